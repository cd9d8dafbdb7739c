"""A step while the scheduler makes it, and its split into a StepPlan and the record of a step in flight."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Int32
from quire.engine.memory.moves import Moves
from quire.engine.schedule.plan import (
    NO_MASKS,
    NO_PAIRS,
    NOTHING,
    PromptLogprobs,
    RowStart,
    StepHandle,
    StepPlan,
)
from quire.engine.sequences.rows import Index, Overrides, Rows, Samples
from quire.engine.sequences.sequence import Sequence, SequenceGroup

Filled = list[tuple[Sequence, int]]
"""Sequences, and how many full blocks each has."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens start..end-1 of `sequence` are computed; `samples` draw from the last one's logits."""

    sequence: Sequence
    start: int
    end: int
    samples: list[Sequence]
    row: int


@dataclass(frozen=True, slots=True)
class WantedPromptLogprobs:
    """Targets of one plan entry: tokens first_target, first_target + 1 … of the group's prompt."""

    group: SequenceGroup
    first_target: int
    targets: list[int]


class Transfers(msgspec.Struct):
    """A step's moves between the tiers, which may take longer than the step."""

    moves: Moves
    loaded: Filled  # with the blocks that come from the host
    groups: list[SequenceGroup]  # that run or wait again once they are done
    handle: StepHandle | None = None  # of the step, once it is committed

    @property
    def is_empty(self) -> bool:
        return not self.moves.has_transfers and not self.groups

    def are_done(self, *, wait: bool) -> bool:
        """Return whether all blocks are where they go; `wait`: block until they are."""
        assert self.handle is not None, "its step was never launched"
        return self.handle.has_moved(wait=wait)


class InFlightStep(msgspec.Struct):
    """A step from its plan to its commit: the scheduler's record of it, and the runner's handle."""

    samples: Samples
    positions: Int32  # [S] that the sampled tokens take in their sequences
    needs_host: NDArray[np.bool_]  # [S] more than a token: it may be the last, has logprobs …
    prompt_logprobs: list[WantedPromptLogprobs]
    filled: Filled  # sequences that filled blocks, by then
    transfers: Transfers
    begun: list[SequenceGroup] = []  # that decode once it is done
    in_lockstep: bool = False  # a sample is of a group that its commit lets go on
    handle: StepHandle | None = None  # once it is launched

    def forget_row(self, sequence: Sequence) -> None:
        """Keep the sample of `sequence`, which leaves its row, from being written to the row."""
        if sequence in self.samples.sequences:
            self.needs_host[self.samples.sequences.index(sequence)] = True


class StepDraft(msgspec.Struct):
    """The work of a step besides its decodes."""

    budget: int = 0  # tokens still to give away
    gathers: bool = False  # groups in lockstep are held until those in flight can go on with them
    prefills: list[Prefill] = []
    starts: list[RowStart] = []
    preempted: set[int] = set()  # rows
    stalled: set[int] = set()  # rows that wait for blocks in transfer
    reserved: int = 0  # blocks in transfer that those rows will take
    transferring: list[SequenceGroup] = []
    loaded: Filled = []

    def start(self, sequence: Sequence) -> None:
        """Have the device lay down the sampling state of `sequence` in its row."""
        group = sequence.group
        params, pooling = group.request.params, group.request.pooling
        penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        self.starts.append(
            RowStart(
                row=sequence.row,
                index=sequence.index,
                params=params,
                num_prompt=group.num_prompt,
                stop_tokens=group.stop_tokens,
                prompt=group.request.prompt if penalised else [],
                output=sequence.tokens[group.num_prompt :].tolist() if penalised else [],
                num_candidates=group.beams.num_candidates if group.beams is not None else 0,
                unpooled=pooling.unpooled if pooling is not None else 0,
            )
        )

    def holds(self, group: SequenceGroup) -> bool:
        """Return whether `group` is left out of this step, to go on together with those in flight.

        A step of all groups in lockstep takes little longer than one of half of them, which would follow
        each other for good once they had begun apart.
        """
        return self.gathers and group.in_lockstep

    def await_blocks(self, group: SequenceGroup) -> None:
        """Leave `group` alone until this step's transfers are done: its blocks are on their way."""
        group.transferring = True
        self.transferring.append(group)

    def forget_preempted(self) -> None:
        """Drop all that was drafted for rows that were preempted."""
        self.prefills = [prefill for prefill in self.prefills if prefill.row not in self.preempted]

    def decode_plan(
        self, rows: Rows, decodes: Index, contexts: Int32, moves: Moves, overrides: Overrides
    ) -> tuple[StepPlan, InFlightStep]:
        """Return the plan of a step without prefills, and its record.

        `rows` are as they will be once the step is done, and `contexts` [B] those of the `decodes` [B].
        """
        samples = rows.samples(decodes)
        plan = StepPlan(
            rows=samples.rows,
            num_decodes=len(decodes),
            query_lens=rows.ones[: len(decodes)],
            context_lens=contexts,
            prefill_tokens=NOTHING,
            sample_tokens=rows.numbers[: len(decodes)],
            sample_positions=contexts,
            **self._common_fields(samples, moves, overrides),
        )
        return plan, self._record(samples, contexts, [], _full_rows(rows, decodes, contexts), moves)

    def mixed_plan(
        self,
        rows: Rows,
        decodes: Index,
        contexts: Int32,
        moves: Moves,
        overrides: Overrides,
        block_size: int,
    ) -> tuple[StepPlan, InFlightStep]:
        """Return the plan of a step that prefills too, and its record; arguments as of `decode_plan`."""
        first, ends = len(decodes), []  # place of a chunk's first token in the step; of each sampling one
        chunks: list[Int32] = []
        asked: list[PromptLogprobs] = []
        wanted: list[WantedPromptLogprobs] = []
        for prefill in self.prefills:
            run = _prompt_logprobs(prefill)
            if run is not None:
                wanted.append(run)
                k = run.group.request.params.prompt_logprobs or 0
                before = first + run.first_target - 1 - prefill.start
                asked.append(PromptLogprobs(before, np.array(run.targets, np.int32), k))
            chunks.append(prefill.sequence.tokens[prefill.start : prefill.end])
            first += len(chunks[-1])
            ends += [first - 1] * len(prefill.samples)
        last_rows = [sequence.row for prefill in self.prefills for sequence in prefill.samples]
        sampling = np.concatenate([decodes, np.array(last_rows, np.intp)])
        samples, positions = rows.samples(sampling), rows.context.take(sampling)
        chunk_rows = np.array([prefill.row for prefill in self.prefills], np.intp)
        all_rows = np.concatenate([decodes, chunk_rows])
        lengths = np.array([prefill.end - prefill.start for prefill in self.prefills], np.int32)
        plan = StepPlan(
            rows=all_rows.astype(np.int32),
            num_decodes=len(decodes),
            query_lens=np.concatenate([rows.ones[: len(decodes)], lengths]),
            context_lens=rows.context.take(all_rows),
            prefill_tokens=np.concatenate(chunks),
            sample_tokens=np.concatenate([rows.numbers[: len(decodes)], np.array(ends, np.int32)]),
            sample_positions=positions,
            prompt_logprobs=tuple(asked),
            **self._common_fields(samples, moves, overrides),
        )
        filled = _full_rows(rows, decodes, contexts)
        filled += [(prefill.sequence, prefill.end // block_size) for prefill in self.prefills]
        return plan, self._record(samples, positions, wanted, filled, moves)

    def _common_fields(self, samples: Samples, moves: Moves, overrides: Overrides) -> dict[str, Any]:
        """Return the fields of a StepPlan that are made alike with and without prefills."""
        entries = np.fromiter(chain.from_iterable(moves.entries), np.int32, 2 * len(moves.entries))
        masked = samples.constrained
        return {
            "starts": tuple(self.starts),
            "override_rows": overrides[0],
            "override_tokens": overrides[1],
            "table_rows": entries[::2],
            "table_columns": entries[1::2],
            "table_blocks": np.fromiter(moves.entries.values(), np.int32, len(moves.entries)),
            "copies": _pairs(moves.copies.values()),
            "swap_out": _pairs([(t.device, t.host) for t in (*moves.swap_out, *moves.spills)]),
            "swap_in": _pairs([(t.host, t.device) for t in moves.swap_in]),
            "sample_rows": samples.rows,
            "masked_samples": _int32(masked),
            "masks": _masks([samples.sequences[i] for i in masked]),
        }

    def _record(
        self,
        samples: Samples,
        positions: Int32,
        wanted: list[WantedPromptLogprobs],
        filled: Filled,
        moves: Moves,
    ) -> InFlightStep:
        return InFlightStep(
            samples=samples,
            positions=positions,
            needs_host=samples.needs_host | (positions >= samples.limit),
            prompt_logprobs=wanted,
            filled=filled,
            transfers=Transfers(moves, self.loaded, self.transferring),
        )


def _full_rows(rows: Rows, decodes: Index, contexts: Int32) -> Filled:
    """Return those of the decodes that fill their last block in this step."""
    full = decodes[contexts == rows.capacity.take(decodes)]
    return [(sequence := rows.sequences[row], sequence.num_blocks) for row in full.tolist()]


def _int32(values: Collection[int]) -> Int32:
    return np.fromiter(values, np.int32, len(values)) if values else NOTHING


def _masks(sequences: list[Sequence]) -> Int32:
    """Return the tokens that these constrained sequences may take: [M, words]."""
    return np.stack([sequence.next_mask() for sequence in sequences]) if sequences else NO_MASKS


def _pairs(pairs: Collection[tuple[int, int]]) -> Int32:
    if not pairs:
        return NO_PAIRS
    return np.fromiter(chain.from_iterable(pairs), np.int32, 2 * len(pairs)).reshape(-1, 2)


def _prompt_logprobs(prefill: Prefill) -> WantedPromptLogprobs | None:
    """Return the prompt tokens that this chunk predicts and whose log-probabilities are still wanted."""
    group = prefill.sequence.group
    if group.prompt_logprobs is None:
        return None
    first = max(prefill.start + 1, group.prompt_logprobs_asked)
    end = min(prefill.end + 1, group.num_prompt)
    if first >= end:
        return None
    group.prompt_logprobs_asked = end
    return WantedPromptLogprobs(group, first, group.request.prompt[first:end])
