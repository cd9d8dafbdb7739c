"""Gated delta nets as Qwen3.5, Qwen3-Next, OLMo Hybrid and Kimi Linear have them, by kernels alone.

One product gives all that is projected of a token, or two, where weights of betas and decays are not in the
few bits that others are in. Their own code has up to six products, and computes decays and betas by eight of
torch's kernels, of a few numbers each in a decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.general.gated_norms import gated_norm_of
from quire.engine.models.general.kept_linear import KeptLinear, release
from quire.engine.models.general.modules import LinearModule
from quire.engine.models.general.proof import merged
from quire.engine.models.general.stateful import Called
from quire.kernels.backend import Backend
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import AnyLinear
from quire.kernels.pointwise.gated_norm import GatedNorm
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.rows import in_order, joined, padded
from quire.kernels.recurrence.delta_net import Gates
from quire.kernels.recurrence.step import StateStep

_ROWS = 256  # of which there is a multiple in the product, as kernels of many tokens want
# Projections: those that give queries, keys, values and gates, and those that give betas and decays.
_Names = tuple[tuple[str, ...], tuple[str, ...]]
_QWEN3_5: _Names = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
_QWEN3_NEXT: _Names = (("in_proj_qkvz",), ("in_proj_ba",))
_OLMO: _Names = (("q_proj", "k_proj", "v_proj", "g_proj"), ("b_proj", "a_proj"))
_KIMI: _Names = (("q_proj", "k_proj", "v_proj", "g_a_proj"), ("b_proj", "forget_gate.f_a_proj"))
_KIMI_FURTHER = ("g_b_proj", "forget_gate.f_b_proj")
NAMES = (_QWEN3_5, _QWEN3_NEXT, _OLMO, _KIMI)
_DECAYS = {"A_log", "dt_bias"}
_OTHERS = ({"conv1d", "norm", "out_proj"}, {"conv1d", "o_norm", "o_proj"})


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The weights of such a net of H heads.

    product: gives queries, keys and values, gates, betas of each head, and decays, of which there are as
    many numbers as `widths` says, and zeros behind these. few: None, or gives betas and decays, and zeros
    behind these, which the other does not give then. further: what gates and decays are multiplied by
    once more, if anything. convolution: weight [C, K], bias or None, and whether SiLU follows. decays: a_log
    [H], dt_bias, and what betas are below. norm: of the values of all heads.
    """

    product: AnyLinear
    few: AnyLinear | None
    widths: tuple[int, int, int, int]
    further: tuple[AnyLinear, AnyLinear] | None
    convolution: tuple[Tensor, Tensor | None, bool]
    decays: Gates
    norm: GatedNorm
    own: tuple[nn.Linear, ...]

    def release_own(self) -> None:
        """Take the weights of the module's own projections from it, which it can do without."""
        for each in self.own:
            vars(each).pop("forward", None)
            release(each)
        if self.product.weight.device.type == "cuda":  # memory that they had apart is none that others fit in
            torch.cuda.empty_cache()


def is_delta_net(module: nn.Module) -> bool:
    """Return whether a module has the parts of such a net, and no others."""
    return any(_has(module, names) for names in NAMES)


def delta_net_of(module: nn.Module) -> DeltaNet | None:
    """Return the weights of a module that has the parts of such a net: a copy where they are its own."""
    parts: Any = module
    names = next((each for each in NAMES if _has(module, each)), None)
    if names is None:
        return None
    wide, few = (tuple(parts.get_submodule(name) for name in each) for each in names)
    further = tuple(parts.get_submodule(name) for name in _KIMI_FURTHER) if names is _KIMI else ()
    found = gated_norm_of(parts.norm if hasattr(module, "norm") else parts.o_norm)
    if found is None or found.groups != 1 or not all(map(_is_plain, (*wide, *few, *further))):
        return None
    of_decays = parts.forget_gate if names is _KIMI else parts
    heads = of_decays.A_log.numel()
    values = heads * len(found.weight)
    channels = parts.conv1d.weight.shape[0]
    order = None
    if names is _QWEN3_NEXT:
        order = _rows_of_next(parts.num_k_heads, heads, channels - values, values, of_decays.A_log.device)
    gates, decays = (each.in_features for each in further) if further else (values, heads)
    widths = (channels, gates, heads, decays)
    outputs = [sum(each.out_features for each in some) for some in (wide, few)]
    if outputs != [channels + gates, heads + decays]:
        return None
    most = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
    product, of_few = _products(wide, few, order)
    return DeltaNet(
        product=product,
        few=of_few,
        widths=widths,
        further=(merged(further[:1]), merged(further[1:])) if further else None,
        convolution=(parts.conv1d.weight.squeeze(1), parts.conv1d.bias, parts.activation is not None),
        decays=(of_decays.A_log.flatten(), of_decays.dt_bias, most),
        norm=GatedNorm(found.weight.repeat(heads), found.eps, heads, found.activation, found.gate_first),
        own=(*wide, *few),
    )


def _has(module: nn.Module, names: _Names) -> bool:
    """Return whether a module has projections of these names, what follows them, and nothing else."""
    every = {*names[0], *names[1], *(_KIMI_FURTHER if names is _KIMI else ())}
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
    return own and type(module) in (nn.Linear, KeptLinear) and module.bias is None


def _products(
    wide: Sequence[nn.Linear], few: Sequence[nn.Linear], order: Tensor | None
) -> tuple[AnyLinear, AnyLinear | None]:
    """Return the product of all projections, rows in that order; or of the first ones, and of the others."""
    forms = {each.kept.format if isinstance(each, KeptLinear) else None for each in (*wide, *few)}
    if len(forms) == 1:
        return _product((*wide, *few), order), None
    if order is None:
        return _product(wide, None), _product(few, None)
    rows = sum(each.out_features for each in wide)
    return _product(wide, order[:rows]), _product(few, order[rows:] - rows)


def _product(parts: Sequence[nn.Linear], order: Tensor | None) -> AnyLinear:
    """Return a copy of projections, rows in that order, and as many of zeros behind them as kernels want."""
    kept = [each.kept for each in parts if isinstance(each, KeptLinear)]
    if len(kept) == len(parts):
        both = joined(kept)
        both = both if order is None else in_order(both, order)
        return QuantisedLinear(padded(both, -both.shape[0] % _ROWS), None)
    weight = torch.cat([each.weight.data for each in parts])
    weight = weight if order is None else weight[order]
    return Linear(torch.cat((weight, weight.new_zeros(-len(weight) % _ROWS, weight.shape[1]))), None)


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

    def _projected(self, hidden: Tensor) -> Sequence[Tensor]:
        """Return what is mixed, gates, what betas are made of, and decays [T, …] of hidden states [T, …]."""
        net, linear = self.net, self._backend.linear
        if net.few is None:
            return linear(hidden, net.product)[:, : sum(net.widths)].split(net.widths, dim=1)
        wide, few = net.widths[:2], net.widths[2:]
        return (
            *linear(hidden, net.product)[:, : sum(wide)].split(wide, dim=1),
            *linear(hidden, net.few)[:, : sum(few)].split(few, dim=1),
        )

    def _attended(self, hidden: Tensor, step: StateStep, states: Sequence[Tensor]) -> Tensor:
        """Return what the net sees in its states [T, H * Dv], of hidden states [T, …]."""
        net, backend, recurrences, (newest, summed) = self.net, self._backend, self._recurrences, states
        heads, keys, values = summed.shape[1:]
        mixed, gates, b, a = self._projected(hidden)
        if net.further is not None:
            gates, a = (backend.linear(x, layer) for x, layer in zip((gates, a), net.further, strict=True))
        mixed = recurrences.convolve(mixed, *net.convolution, newest, step)
        of_values = heads * values
        of_keys = (mixed.shape[1] - of_values) // 2
        q, k, v = mixed.split([of_keys, of_keys, of_values], dim=1)
        q, k, v = q.unflatten(1, (-1, keys)), k.unflatten(1, (-1, keys)), v.unflatten(1, (-1, values))
        seen = recurrences.delta_net(q, k, v, a, b, net.decays, summed, step)
        return backend.gated_norm(seen.view(-1, of_values), gates, net.norm)
