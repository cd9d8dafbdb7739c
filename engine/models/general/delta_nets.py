"""Gated delta nets as Qwen3.5, Qwen3-Next, OLMo Hybrid and Kimi Linear have them, by kernels alone.

One product gives all that is projected of a token. Their own code has up to six products, and computes decays
and betas by eight of torch's kernels, of a few numbers each in a decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.general.gated_norms import gated_norm_of
from quire.engine.models.general.modules import LinearModule
from quire.engine.models.general.stateful import Called
from quire.kernels.backend import Backend
from quire.kernels.linear.linear import Linear
from quire.kernels.pointwise.gated_norm import GatedNorm
from quire.kernels.recurrence.delta_net import Gates
from quire.kernels.recurrence.step import StateStep

_ROWS = 256  # of which there is a multiple in the product, as kernels of many tokens want
_QWEN3_5 = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_QWEN3_NEXT = ("in_proj_qkvz", "in_proj_ba")
_OLMO = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
_KIMI = ("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "forget_gate.f_a_proj")
_KIMI_FURTHER = ("g_b_proj", "forget_gate.f_b_proj")
_DECAYS = {"A_log", "dt_bias"}
_OTHERS = ({"conv1d", "norm", "out_proj"}, {"conv1d", "o_norm", "o_proj"})


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The weights of such a net of H heads.

    product: gives queries, keys and values, gates, betas of each head, and decays, of which there are as
    many numbers as `widths` says, and zeros behind these. further: what gates and decays are multiplied by
    once more, if anything. convolution: weight [C, K], bias or None, and whether SiLU follows. decays: a_log
    [H], dt_bias, and what betas are below. norm: of the values of all heads.
    """

    product: Linear
    widths: tuple[int, int, int, int]
    further: tuple[Linear, Linear] | None
    convolution: tuple[Tensor, Tensor | None, bool]
    decays: Gates
    norm: GatedNorm
    own: tuple[nn.Linear, ...]

    def release_own(self) -> None:
        """Take the weights of the module's own projections from it, which it can do without."""
        for each in self.own:
            vars(each).pop("forward", None)
            each.weight.data = self.product.weight[:0]
        if self.product.weight.is_cuda:  # memory that they had apart is none that others fit in
            torch.cuda.empty_cache()


def is_delta_net(module: nn.Module) -> bool:
    """Return whether a module has the parts of such a net, and no others."""
    return any(_has(module, names) for names in (_QWEN3_5, _QWEN3_NEXT, _OLMO, _KIMI))


def delta_net_of(module: nn.Module) -> DeltaNet | None:
    """Return the weights of a module that has the parts of such a net: a copy where they are its own."""
    parts: Any = module
    names = next((each for each in (_QWEN3_5, _QWEN3_NEXT, _OLMO, _KIMI) if _has(module, each)), None)
    if names is None:
        return None
    own = tuple(parts.get_submodule(name) for name in names)
    further = tuple(parts.get_submodule(name) for name in _KIMI_FURTHER) if names is _KIMI else ()
    found = gated_norm_of(parts.norm if hasattr(module, "norm") else parts.o_norm)
    if found is None or found.groups != 1 or not all(map(_is_plain, (*own, *further))):
        return None
    of_decays = parts.forget_gate if names is _KIMI else parts
    weight = torch.cat([each.weight.data for each in own])
    heads = of_decays.A_log.numel()
    values = heads * len(found.weight)
    channels = parts.conv1d.weight.shape[0]
    if names is _QWEN3_NEXT:
        weight = weight[_rows_of_next(parts.num_k_heads, heads, channels - values, values, weight.device)]
    gates, decays = (each.in_features for each in further) if further else (values, heads)
    widths = (channels, gates, heads, decays)
    if sum(widths) != len(weight):
        return None
    most = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
    weight = torch.cat((weight, weight.new_zeros(-len(weight) % _ROWS, weight.shape[1])))
    return DeltaNet(
        product=Linear(weight, None),
        widths=widths,
        further=(Linear(further[0].weight.data, None), Linear(further[1].weight.data, None))
        if further
        else None,
        convolution=(parts.conv1d.weight.squeeze(1), parts.conv1d.bias, parts.activation is not None),
        decays=(of_decays.A_log.flatten(), of_decays.dt_bias, most),
        norm=GatedNorm(found.weight.repeat(heads), found.eps, heads, found.activation, found.gate_first),
        own=own,
    )


def _has(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether a module has projections of these names, what follows them, and nothing else."""
    every = {*names, *(_KIMI_FURTHER if names is _KIMI else ())}
    children = {name.split(".")[0] for name in every}
    found = {name for name, _ in module.named_children()}
    weights = {name for name, _ in module.named_parameters(recurse=False)}
    if not all(_submodule(module, name) is not None for name in every):
        return False
    return found - children in _OTHERS and weights == (set() if names is _KIMI else _DECAYS)


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is a product of all that it is given, and no more."""
    own = isinstance(vars(module).get("forward"), LinearModule | None)
    return own and type(module) is nn.Linear and module.bias is None


def _rows_of_next(key_heads: int, heads: int, keys: int, values: int, device: torch.device) -> Tensor:
    """Return the rows of Qwen3-Next's projections in our order, which have a key head's all together.

    keys: numbers of all queries and keys. values: of all heads.
    """
    key, value, group = keys // 2 // key_heads, values // key_heads, heads // key_heads
    wide = torch.arange(keys + 2 * values, device=device).view(key_heads, -1)
    few = torch.arange(2 * heads, device=device).view(key_heads, -1) + keys + 2 * values
    parts = (*wide.split([key, key, value, value], dim=1), *few.split([group, group], dim=1))
    return torch.cat([part.flatten() for part in parts])


class DeltaNetModule:
    """In place of the `forward` of a module that is such a net, and whose states are known.

    step: the step's tokens, and the module's states.
    """

    def __init__(
        self,
        backend: Backend,
        module: nn.Module,
        step: Callable[[], tuple[StateStep, Sequence[Tensor]] | None],
    ) -> None:
        net = delta_net_of(module)
        if net is None:
            raise ValueError("its norm or its projections are none that are known")
        assert backend.recurrences is not None
        self.net, self._backend, self._recurrences = net, backend, backend.recurrences
        parts: Any = module
        self._output = parts.out_proj if hasattr(module, "out_proj") else parts.o_proj
        self._named, self._step = Called(module).named, step

    def __call__(self, *args: Any, **given: Any) -> Any:
        of_step = self._step()
        assert of_step is not None
        hidden = self._named(args, given)["hidden_states"]
        return self._output(self._attended(hidden[0], *of_step)[None])

    def _attended(self, hidden: Tensor, step: StateStep, states: Sequence[Tensor]) -> Tensor:
        """Return what the net sees in its states [T, H * Dv], of hidden states [T, …]."""
        net, backend, recurrences, (newest, summed) = self.net, self._backend, self._recurrences, states
        heads, keys, values = summed.shape[1:]
        projected = backend.linear(hidden, net.product)[:, : sum(net.widths)]
        mixed, gates, b, a = projected.split(net.widths, dim=1)
        if net.further is not None:
            gates, a = (backend.linear(x, layer) for x, layer in zip((gates, a), net.further, strict=True))
        mixed = recurrences.convolve(mixed, *net.convolution, newest, step)
        of_values = heads * values
        of_keys = (mixed.shape[1] - of_values) // 2
        q, k, v = mixed.split([of_keys, of_keys, of_values], dim=1)
        q, k, v = q.unflatten(1, (-1, keys)), k.unflatten(1, (-1, keys)), v.unflatten(1, (-1, values))
        seen = recurrences.delta_net(q, k, v, a, b, net.decays, summed, step)
        return backend.gated_norm(seen.view(-1, of_values), gates, net.norm)
