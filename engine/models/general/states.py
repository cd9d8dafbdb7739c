"""States that each token changes, in modules of transformers, over the blocks that sequences have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from quire.engine.models.general.agreement import Agree
from quire.engine.models.general.delta_nets import DeltaNetModule, is_delta_net
from quire.engine.models.general.pieces import Piece, PieceModule, pieces_of
from quire.engine.models.general.scans import ScanModule, StateSpaceModule, is_scan, is_state_space
from quire.engine.models.general.short_convolutions import (
    ShortConvolutionModule,
    is_short_convolution,
)
from quire.engine.models.general.state_chunks import state_steps
from quire.engine.models.general.state_proof import StandIn, Step, is_proved
from quire.engine.models.general.stateful import state_modules
from quire.engine.models.general.whole_steps import WholeStepModule, is_known
from quire.kernels.attention.batch import ForwardBatch
from quire.kernels.backend import Backend
from quire.kernels.formats.state_cache import StateCache
from quire.kernels.formats.state_spec import LayerStates
from quire.kernels.recurrence.operations import Recurrences
from quire.kernels.recurrence.step import StateStep

logger = logging.getLogger("quire.engine")
# What has no code of transformers' but for products, by what tells which modules those are.
_BY_KERNELS = (
    (is_delta_net, DeltaNetModule),
    (is_state_space, StateSpaceModule),
    (is_scan, ScanModule),
    (is_short_convolution, ShortConvolutionModule),
)


class StepStates:
    """The states of the step that `begin` was told of."""

    def __init__(self, group_of_states: Sequence[int], recurrences: Recurrences | None) -> None:
        """recurrences: what computes layers that take a step as a whole; None: none does."""
        self._group_of_states, self._recurrences = group_of_states, recurrences
        self._groups: tuple[ForwardBatch, ...] = ()
        self._cache: StateCache | None = None
        self._pieces: dict[int, list[Piece]] = {}
        self._steps: list[StateStep] = []

    def begin(self, batch: ForwardBatch, cache: StateCache) -> None:
        self._groups, self._cache = (batch, *batch.other_groups), cache
        self._pieces.clear()
        self._steps = []

    def in_pieces(self, layer: int) -> tuple[list[Piece], Sequence[Tensor]] | None:
        """Return which pieces go through a layer, and its states; None before the first step."""
        cache, group = self._cache, self._group_of_states[layer]
        if cache is None:
            return None
        if group not in self._pieces:
            self._pieces[group] = pieces_of(self._groups[group], cache.block_size, cache.spare)
        return self._pieces[group], cache.layers[layer]

    def whole(self, layer: int) -> tuple[StateStep, Sequence[Tensor]] | None:
        """Return the step as kernels take it that compute a layer, and its states; None before the first."""
        cache, group = self._cache, self._group_of_states[layer]
        if cache is None:
            return None
        if not self._steps:
            assert self._recurrences is not None
            self._steps = state_steps(self._groups, cache.block_size, self._recurrences)
        return self._steps[group], cache.layers[layer]


def give_states(
    model: nn.Module,
    layers: Sequence[LayerStates],
    step: StepStates,
    backend: Backend,
    hidden: int,
    agree: Agree = bool,
) -> bool:
    """Have the modules that keep these states go on from those of the step that `step` was told of.

    With kernels those that they know compute all of a step at once, if the first of those that are made
    alike, of inputs with so many columns, gives what its own code does; the others a piece at a time. Return
    whether there are such. agree: tells whether all ranks, which have all states, find the same.
    """
    modules = dict(state_modules(model))
    proved: dict[tuple[Any, ...], StandIn | None] = {}
    takes_pieces = False
    for at, layer in enumerate(layers):
        module, forward = modules[layer.name], None
        if backend.recurrences is not None and is_known(module, layer):
            prove = partial(_stand_in_of, module, layer, backend, backend.recurrences, hidden, agree)
            kind, own = (layer.parts, *_makeup(module)), partial(step.whole, at)
            if kind not in proved:
                proved[kind] = prove()
            if (stand_in := proved[kind]) is not None:
                forward = _made(stand_in, module, own)
                if not agree(forward is not None):
                    forward = _made(prove(), module, own)
        if forward is None:
            forward = PieceModule(module, layer, partial(step.in_pieces, at))
            takes_pieces = True
        module.forward = forward
        if isinstance(forward, DeltaNetModule):
            forward.net.release_own()
    return takes_pieces


def _makeup(module: nn.Module) -> tuple[Any, ...]:
    """Return what modules have in common that are alike but for their numbers."""
    parts = ((name, type(part)) for name, part in module.named_modules())
    weights = ((name, weight.shape, weight.dtype) for name, weight in module.named_parameters())
    return (*parts, *weights)


def _made(
    stand_in: StandIn | None, module: nn.Module, step: Callable[[], Step | None]
) -> Callable[..., Any] | None:
    """Return what stands in for a module; None, if it cannot: its numbers may be others than those tried."""
    try:
        return None if stand_in is None else stand_in(module, step)
    except ValueError:
        return None


def _stand_in_of(
    module: nn.Module,
    layer: LayerStates,
    backend: Backend,
    recurrences: Recurrences,
    hidden: int,
    agree: Agree,
) -> StandIn | None:
    """Return the quickest of what stands in for a known module and gives what its own code does."""
    stand_ins: list[StandIn] = [partial(kind, backend) for takes, kind in _BY_KERNELS if takes(module)]
    stand_ins.append(partial(WholeStepModule, recurrences))
    for stand_in in stand_ins:
        if agree(is_proved(module, layer, stand_in, hidden)):
            return stand_in
    logger.warning(
        "%s keeps states by transformers' code, and slower: kernels give other numbers here (%s)",
        type(module).__name__,
        layer.name,
    )
    return None
