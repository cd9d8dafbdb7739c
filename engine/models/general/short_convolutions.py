"""Convolutions between two gates as LFM2 has them, whose gates are multiplied by the convolution's kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from quire.engine.models.general.stateful import Called
from quire.kernels.backend import Backend
from quire.kernels.recurrence.step import StateStep

_PARTS = {"conv", "in_proj", "out_proj"}


def is_short_convolution(module: nn.Module) -> bool:
    """Return whether a module has the parts of such a convolution, and no others."""
    return {name for name, _ in module.named_children()} == _PARTS and not [
        *module.named_parameters(recurse=False)
    ]


class ShortConvolutionModule:
    """In place of the `forward` of a module that `is_short_convolution`, and whose state is known.

    step: the step's tokens, and the module's state.
    """

    def __init__(
        self,
        backend: Backend,
        module: nn.Module,
        step: Callable[[], tuple[StateStep, Sequence[Tensor]] | None],
    ) -> None:
        assert backend.recurrences is not None
        self._module: Any = module
        self._named, self._step = Called(module).named, step
        self._convolve = backend.recurrences.convolve

    def __call__(self, *args: Any, **given: Any) -> Any:
        of_step = self._step()
        assert of_step is not None
        module, (step, (newest,)) = self._module, of_step
        hidden = self._named(args, given)["hidden_states"]
        before, behind, x = module.in_proj(hidden)[0].chunk(3, dim=1)
        weight, bias = module.conv.weight.squeeze(1), module.conv.bias
        return module.out_proj(self._convolve(x, weight, bias, False, newest, step, (before, behind))[None])
