"""Gated delta nets as Qwen3.5 has them, by kernels alone from their projections on.

Their own code computes decays and betas by eight of torch's kernels, of a few numbers each in a decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from quire.engine.models.general.stateful import Called
from quire.engine.models.general.whole_steps import WholeStepModule
from quire.kernels.recurrence.operations import Recurrences
from quire.kernels.recurrence.step import StateStep

_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj")
_WEIGHTS = {"A_log", "dt_bias"}


def is_delta_net(module: nn.Module) -> bool:
    """Return whether a module has the parts of such a net, and no others."""
    return {name for name, _ in module.named_children()} == {*_PARTS} and {
        name for name, _ in module.named_parameters(recurse=False)
    } == _WEIGHTS


class DeltaNetModule:
    """In place of the `forward` of a module that `is_delta_net`, and whose states are known.

    step: the step's tokens, and the module's states; None before the first step.
    """

    def __init__(
        self,
        recurrences: Recurrences,
        module: nn.Module,
        step: Callable[[], tuple[StateStep, Sequence[Tensor]] | None],
    ) -> None:
        self._module: Any = module
        self._named, self._own_code = Called(module).named, WholeStepModule(recurrences, module, step)
        self._recurrences, self._step = recurrences, step

    def __call__(self, *args: Any, **given: Any) -> Any:
        of_step = self._step()
        if of_step is None:
            return self._own_code(*args, **given)
        hidden = self._named(args, given)["hidden_states"]
        return self._module.out_proj(self._attended(hidden, *of_step))

    def _attended(self, hidden: Tensor, step: StateStep, states: Sequence[Tensor]) -> Tensor:
        """Return what the net sees in its states [1, T, H * Dv], of hidden states [1, T, …]."""
        module, recurrences, (newest, summed) = self._module, self._recurrences, states
        heads, keys, values = summed.shape[1:]
        weight, bias, silu = (
            module.conv1d.weight.squeeze(1),
            module.conv1d.bias,
            module.activation is not None,
        )
        mixed = recurrences.convolve(module.in_proj_qkv(hidden)[0], weight, bias, silu, newest, step)
        of_values = heads * values
        of_keys = (mixed.shape[1] - of_values) // 2
        q, k, v = mixed.split([of_keys, of_keys, of_values], dim=1)
        q, k, v = q.unflatten(1, (-1, keys)), k.unflatten(1, (-1, keys)), v.unflatten(1, (-1, values))
        decays, betas = recurrences.delta_gates(
            module.in_proj_a(hidden)[0], module.in_proj_b(hidden)[0], module.A_log, module.dt_bias
        )
        seen = recurrences.gated_delta_rule(q, k, v, decays, betas, summed, step, normalised=True)
        gate = module.in_proj_z(hidden).reshape(-1, values)
        normed: Tensor = module.norm(seen.view(-1, values), gate)
        return normed.view(1, -1, of_values)
