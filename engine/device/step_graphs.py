"""Which steps are worth a CUDA graph: decodes by batch, mixed steps by tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from quire.engine.arrays import Int32
from quire.engine.device.graphs import Graphs, Size, choosing_sizes, decode_sizes, sharing_sizes
from quire.engine.device.inputs import (
    DecodeInputs,
    MixedInputs,
    NewestInputs,
    idle_decode,
    idle_mixed,
    split_mixed,
)
from quire.engine.device.limits import Limits
from quire.engine.models.pooling import Pooling
from quire.kernels.attention.batch import Span

Spans = tuple[Span, ...] | None
Decode = Callable[[DecodeInputs[Tensor], Spans], tuple[Tensor, Tensor]]
Forward = Callable[[MixedInputs[Tensor], NewestInputs[Tensor] | None, int | None, Spans], Tensor]
Idle = list[Sequence[Int32]]


@dataclass(frozen=True, slots=True)
class IdleSteps:
    """Steps of nobody, of each size that is worth a graph, in rising order."""

    decode: Idle
    mixed: Idle
    choosing_decode: Idle
    choosing_mixed: Idle


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Steps at all their sizes.

    Those that choose are for rows that may have more tokens than indexers choose of them.
    """

    decode: Graphs
    mixed: Graphs
    choosing_decode: Graphs
    choosing_mixed: Graphs

    @property
    def families(self) -> list[Graphs]:
        return [self.decode, self.mixed, self.choosing_decode, self.choosing_mixed]

    def of_decodes(self, spans: Spans) -> Graphs:
        return self.decode if spans is None else self.choosing_decode

    def of_mixed(self, spans: Spans) -> Graphs:
        return self.mixed if spans is None else self.choosing_mixed

    def to_warm_up(self) -> list[Size]:
        """Return all sizes, first those that take longest to compile: kernels of many tokens.

        Before them is one decode: its `token_places` is launched even where all else is only compiled, and
        should not have to wait. (The other such kernel, `copy_pinned`'s, has been there since the runner was
        made.)
        """
        decodes = self.decode.sizes
        choosing = (*self.choosing_decode.sizes, *self.choosing_mixed.sizes)
        return [*decodes[:1], *reversed(self.mixed.sizes), *decodes[1:], *choosing]


def idle_steps(
    limits: Limits,
    mixed_sizes: Sequence[int],
    cascade_width: int | None,
    pooling: Pooling | None,
    *,
    choosing: bool,
) -> IdleSteps:
    """Return the sizes that are worth a graph.

    cascade_width: of rows that share prefixes, None: none do. pooling: of a model that gives vectors.
    choosing: graphs may hold what chooses tokens.
    """
    rows = limits.max_num_seqs

    def mixed_of(sizes: Sequence[int]) -> Idle:
        if pooling is not None and pooling.needs_all:  # graphs give the newest tokens' states
            return []
        return [list(chain(*idle_mixed(size, rows))) for size in sizes]

    plain = [] if pooling is not None else [idle_decode(size, rows) for size in decode_sizes(rows)]
    sharing = []
    if cascade_width is not None and plain:
        sharing = [idle_decode(size, rows, cascade_width) for size in sharing_sizes(rows)]
    return IdleSteps(
        decode=[*sorted((*plain, *sharing), key=lambda inputs: len(inputs.rows))],
        mixed=mixed_of(mixed_sizes),
        choosing_decode=[*plain] if choosing else [],
        choosing_mixed=mixed_of(choosing_sizes(limits.max_num_batched_tokens, limits.max_model_len))
        if choosing
        else [],
    )


def step_graphs(idle: IdleSteps, decode: Decode, forward: Forward, device: torch.device) -> StepGraphs:
    """Return steps at the sizes of `idle`, which `decode` and `forward` compute."""

    def decodes(name: str, spans: Spans, sizes: Idle) -> Graphs:
        return Graphs(name, lambda arrays: decode(DecodeInputs(*arrays), spans), sizes, device)

    def mixed(name: str, spans: Spans, sizes: Idle) -> Graphs:
        return Graphs(name, lambda arrays: (forward(*split_mixed(arrays), None, spans),), sizes, device)

    return StepGraphs(
        decode=decodes("decode", None, idle.decode),
        mixed=mixed("mixed", None, idle.mixed),
        choosing_decode=decodes("choosing decode", (), idle.choosing_decode),
        choosing_mixed=mixed("choosing mixed", (), idle.choosing_mixed),
    )
