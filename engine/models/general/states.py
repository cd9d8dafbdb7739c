"""States that each token changes, in modules of transformers, over the blocks that sequences have."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from quire.engine.models.general.delta_nets import DeltaNetModule, is_delta_net
from quire.engine.models.general.pieces import Piece, PieceModule, pieces_of
from quire.engine.models.general.scans import ScanModule, StateSpaceModule, is_scan, is_state_space
from quire.engine.models.general.short_convolutions import (
    ShortConvolutionModule,
    is_short_convolution,
)
from quire.engine.models.general.state_chunks import Chunks, chunks_of, state_step
from quire.engine.models.general.state_proof import StandIn, is_proved
from quire.engine.models.general.stateful import state_modules
from quire.engine.models.general.whole_steps import WholeStepModule, is_known
from quire.kernels.attention.batch import ForwardBatch
from quire.kernels.backend import Backend
from quire.kernels.formats.state_cache import StateCache
from quire.kernels.formats.state_spec import LayerStates, StateSpec
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
        self._steps: dict[int, StateStep] = {}
        self._chunks: Chunks | None = None

    def begin(self, batch: ForwardBatch, cache: StateCache) -> None:
        self._groups, self._cache = (batch, *batch.other_groups), cache
        self._chunks = None
        self._pieces.clear()
        self._steps.clear()

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
        if group not in self._steps:
            assert self._recurrences is not None
            batch = self._groups[group]
            if self._chunks is None and batch.prefill is not None:
                self._chunks = chunks_of(batch.prefill, len(batch.tokens), cache.block_size)
            self._steps[group] = state_step(batch, self._chunks, cache.block_size, self._recurrences)
        return self._steps[group], cache.layers[layer]


def give_states(
    model: nn.Module,
    layers: Sequence[LayerStates],
    step: StepStates,
    backend: Backend,
    hidden: int,
) -> bool:
    """Have the modules that keep these states go on from those of the step that `step` was told of.

    With kernels those that they know compute all of a step at once, if the first of a kind, of inputs with so
    many columns, gives what its own code does; the others a piece at a time. Return whether there are such.
    """
    modules = dict(state_modules(model))
    proved: dict[tuple[type[nn.Module], tuple[StateSpec, ...]], StandIn | None] = {}
    takes_pieces = False
    for at, layer in enumerate(layers):
        module = modules[layer.name]
        kind, stand_in = (type(module), layer.parts), None
        if backend.recurrences is not None and is_known(module, layer):
            if kind not in proved:
                proved[kind] = _stand_in_of(module, layer, backend, backend.recurrences, hidden)
            stand_in = proved[kind]
        if stand_in is not None:
            module.forward = stand_in(module, partial(step.whole, at))
            if isinstance(module.forward, DeltaNetModule):
                module.forward.net.release_own()
        else:
            module.forward = PieceModule(module, layer, partial(step.in_pieces, at))
            takes_pieces = True
    return takes_pieces


def _stand_in_of(
    module: nn.Module, layer: LayerStates, backend: Backend, recurrences: Recurrences, hidden: int
) -> StandIn | None:
    """Return the quickest of what stands in for a known module and gives what its own code does."""
    stand_ins: list[StandIn] = [partial(kind, backend) for takes, kind in _BY_KERNELS if takes(module)]
    stand_ins.append(partial(WholeStepModule, recurrences))
    for stand_in in stand_ins:
        if is_proved(module, layer, stand_in, hidden):
            return stand_in
    logger.warning(
        "%s keeps states by transformers' code, and slower: kernels give other numbers here",
        type(module).__name__,
    )
    return None
