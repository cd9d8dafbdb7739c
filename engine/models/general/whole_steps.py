"""Modules that keep states, called for all tokens of a step at once: their own code, but for what keeps them.

All else that such code does, it does to each token by itself: what reads other tokens needs a state of them.
So in it a convolution and a recurrence over the tokens of one sequence become those over the step's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from quire.engine.models.general import selective_scan
from quire.engine.models.general.own_code import calls, with_functions
from quire.engine.models.general.stateful import Called
from quire.kernels.formats.state_spec import LayerStates
from quire.kernels.recurrence.delta_rule import MOST_WIDTH
from quire.kernels.recurrence.operations import Recurrences
from quire.kernels.recurrence.step import StateStep

_CONVOLUTION = "causal_conv1d_fn"  # names of functions in modelling code
_DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_STATE_SPACES = "mamba2_chunk_scan"
# Of the state of each recurrence.
_DIMENSIONS = {**dict.fromkeys(_DELTA_RULES, 3), _STATE_SPACES: 3, selective_scan.NAME: 2}
_ACTIVATIONS = (None, "silu", "swish")


def is_known(module: nn.Module, layer: LayerStates) -> bool:
    """Return whether all states of a module are those of functions that there are kernels for."""
    forward = type(module).forward
    known = {(True, 0): 2} if calls(forward, _CONVOLUTION) else {}  # and how many dimensions a state has
    called = [name for name in _DIMENSIONS if calls(forward, name)]
    if len(called) == 1:
        known[False, 0] = _DIMENSIONS[called[0]]
    kept = {(part.rolls, part.number): len(part.shape) for part in layer.parts}
    summed = [part for part in layer.parts if not part.rolls]
    fits = all(part.exact and max(part.shape[1:]) <= MOST_WIDTH for part in summed)
    return kept == known and fits and getattr(module, "activation", None) in _ACTIVATIONS


class _NoCache:
    """Stands for transformers' cache: has no state before, so that code takes its way for many tokens."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states


class WholeStepModule:
    """In place of the `forward` of a module that `is_known`.

    step: the step's tokens, and the module's states; None before the first step.
    """

    def __init__(
        self,
        recurrences: Recurrences,
        module: nn.Module,
        step: Callable[[], tuple[StateStep, Sequence[Tensor]] | None],
    ) -> None:
        self._called = Called(module)
        self._without = self._called.forward
        self._recurrences, self._step = recurrences, step
        functions: dict[str, Callable[..., Any]] = {
            _CONVOLUTION: self._convolve,
            _STATE_SPACES: self._scan_state_space,
            selective_scan.NAME: self._scan,
        }
        for name in _DELTA_RULES:
            functions[name] = self._delta_rule
        self._called.forward = partial(with_functions(type(module).forward, functions), module)

    def __call__(self, *args: Any, **given: Any) -> Any:
        named = self._called.named(args, given)
        forward = self._without if self._step() is None else self._called.forward
        return forward(**named, **{self._called.cache: _NoCache()})

    def _found(self, *, rolls: bool) -> tuple[StateStep, Tensor]:
        found = self._step()
        assert found is not None
        step, states = found
        return step, states[0 if rolls else -1]

    # As transformers' functions are called, for a batch of one sequence.

    def _convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        step, state = self._found(rolls=True)
        out = self._recurrences.convolve(x[0].T, weight, bias, activation is not None, state, step)
        return out.T[None]

    def _delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        step, state = self._found(rolls=False)
        given = (query[0], key[0], value[0], g[0], beta[0])
        out = self._recurrences.gated_delta_rule(*given, state, step, normalised=use_qk_l2norm_in_kernel)
        return out[None], state

    def _scan_state_space(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        step, state = self._found(rolls=False)
        given = (x[0], dt[0], A, B[0], C[0], D, dt_bias, dt_limit)
        out = self._recurrences.state_space_scan(*given, state, step)
        return out[None], state

    def _scan(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        step, state = self._found(rolls=False)
        gate = None if z is None else z[0].T
        rows = (x[0].T, dt[0].T, A, B[0].T, C[0].T, D, gate, delta_bias, delta_softplus)
        out = self._recurrences.selective_scan(*rows, state, step)
        return out.T[None], state
