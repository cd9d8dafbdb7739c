"""A step while the scheduler makes it, and its split into a StepPlan and what the scheduler remembers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Int32, empty_int32
from quire.engine.memory.moves import Moves
from quire.engine.schedule.plan import PromptLogprobs, RowStart, StepPlan
from quire.engine.sequences.rows import Index, Rows, Samples
from quire.engine.sequences.sequence import Sequence, SequenceGroup

NOTHING = empty_int32()
NO_PAIRS: Int32 = NOTHING.reshape(0, 2)
NO_MASKS: Int32 = NOTHING.reshape(0, 0)


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


class Delivery(msgspec.Struct):
    """What there is to book when a step's transfers are done, which may take longer than the step."""

    moves: Moves
    brought: list[tuple[Sequence, int]]  # sequences, and how many full blocks they have with those that come
    arrivals: list[SequenceGroup]  # groups whose blocks are where they should be

    @property
    def is_empty(self) -> bool:
        return not self.moves.has_transfers and not self.arrivals


class Flight(msgspec.Struct):
    """A step that was handed out: whom its S samples and its prompt logprobs belong to."""

    samples: Samples
    positions: Int32  # [S] that the sampled tokens take in their sequences
    watched: NDArray[np.bool_]  # [S] there is more to it than a token: it may be the last, has logprobs …
    prompt_logprobs: list[WantedPromptLogprobs]
    filled: list[tuple[Sequence, int]]  # sequences that filled blocks, and how many they have filled by then
    delivery: Delivery

    def watch(self, sequence: Sequence) -> None:
        """`sequence` leaves its row: if it has a sample here, that is not the row's any more."""
        if sequence in self.samples.sequences:
            self.watched[self.samples.sequences.index(sequence)] = True


class StepDraft(msgspec.Struct):
    """What the step does besides its decodes."""

    budget: int = 0  # tokens still to give away
    prefills: list[Prefill] = []
    starts: list[RowStart] = []
    preempted: set[int] = set()  # rows
    stalled: set[int] = set()  # rows that wait for blocks in transfer
    promised: int = 0  # blocks in transfer that those rows will take
    arrivals: list[SequenceGroup] = []
    brought: list[tuple[Sequence, int]] = []  # full blocks that come from the host

    def start(self, sequence: Sequence) -> None:
        group = sequence.group
        params = group.request.params
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
            )
        )

    def await_blocks(self, group: SequenceGroup) -> None:
        """Leave `group` alone until this step's transfers are done: its blocks are on their way."""
        group.transferring = True
        self.arrivals.append(group)

    def forget_preempted(self) -> None:
        """Drop all that was drafted for rows that yielded."""
        self.prefills = [prefill for prefill in self.prefills if prefill.row not in self.preempted]

    def build(
        self,
        rows: Rows,
        decodes: Index,
        contexts: Int32,
        moves: Moves,
        given: dict[int, int],
        block_size: int,
    ) -> tuple[StepPlan, Flight]:
        """The plan, and what to remember of it. `rows` are as they will be once the step is done.

        `contexts` are those of the decodes.
        """
        ones, each = rows.ones[: len(decodes)], rows.numbers[: len(decodes)]
        all_rows, lengths, sampling, sample_tokens = decodes, ones, decodes, each
        context_lens = positions = contexts
        chunks: list[Int32] = []
        asked: list[PromptLogprobs] = []
        wanted: list[WantedPromptLogprobs] = []
        if self.prefills:
            first, ends = len(decodes), []  # place of a chunk's first token in the step; of each sampling one
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
            chunk_rows = [prefill.row for prefill in self.prefills]
            chunk_lengths = [prefill.end - prefill.start for prefill in self.prefills]
            last_rows = [sequence.row for prefill in self.prefills for sequence in prefill.samples]
            all_rows = np.concatenate([decodes, np.array(chunk_rows, np.intp)])
            lengths = np.concatenate([ones, np.array(chunk_lengths, np.int32)])
            sampling = np.concatenate([decodes, np.array(last_rows, np.intp)])
            sample_tokens = np.concatenate([each, np.array(ends, np.int32)])
            context_lens = rows.context.take(all_rows)
            positions = rows.context.take(sampling)
        samples = rows.samples(sampling)
        masked = samples.constrained
        entries = np.fromiter(chain.from_iterable(moves.entries), np.int32, 2 * len(moves.entries))
        plan = StepPlan(
            rows=samples.rows if all_rows is sampling else all_rows.astype(np.int32),
            num_decodes=len(decodes),
            query_lens=lengths,
            context_lens=context_lens,
            prefill_tokens=np.concatenate(chunks) if chunks else NOTHING,
            starts=tuple(self.starts),
            given_rows=_int32(list(given)),
            given_tokens=_int32(list(given.values())),
            table_rows=entries[::2],
            table_columns=entries[1::2],
            table_blocks=np.fromiter(moves.entries.values(), np.int32, len(moves.entries)),
            copies=_pairs(list(moves.copies.values())),
            swap_out=_pairs([(t.device, t.host) for t in (*moves.swap_out, *moves.spills)]),
            swap_in=_pairs([(t.host, t.device) for t in moves.swap_in]),
            sample_rows=samples.rows,
            sample_tokens=sample_tokens,
            sample_positions=positions,
            prompt_logprobs=tuple(asked),
            masked_samples=_int32(masked),
            masks=_masks([samples.sequences[i] for i in masked]),
        )
        full = decodes[contexts == rows.capacity.take(decodes)]
        filled = [(sequence := rows.sequences[row], len(sequence.table)) for row in full.tolist()]
        filled += [(prefill.sequence, prefill.end // block_size) for prefill in self.prefills]
        flight = Flight(
            samples=samples,
            positions=positions,
            watched=samples.watched | (positions >= samples.limit),
            prompt_logprobs=wanted,
            filled=filled,
            delivery=Delivery(moves, self.brought, self.arrivals),
        )
        return plan, flight


def _int32(values: list[int]) -> Int32:
    return np.array(values, np.int32) if values else NOTHING


def _masks(sequences: list[Sequence]) -> Int32:
    """Which tokens these constrained sequences may take: [M, words]."""
    return np.stack([sequence.next_mask() for sequence in sequences]) if sequences else NO_MASKS


def _pairs(pairs: list[tuple[int, int]]) -> Int32:
    return np.array(pairs, np.int32).reshape(-1, 2) if pairs else NO_PAIRS


def _prompt_logprobs(prefill: Prefill) -> WantedPromptLogprobs | None:
    """Prompt tokens that this chunk predicts and whose log-probabilities are still wanted."""
    group = prefill.sequence.group
    if group.prompt_logprobs is None:
        return None
    first = max(prefill.start + 1, group.prompt_logprobs_asked)
    end = min(prefill.end + 1, group.num_prompt)
    if first >= end:
        return None
    group.prompt_logprobs_asked = end
    return WantedPromptLogprobs(group, first, group.request.prompt[first:end])
