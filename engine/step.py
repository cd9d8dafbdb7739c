"""A step while the scheduler makes it, and its split into a StepPlan and what the scheduler remembers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.block_manager import Moves
from engine.plan import Int32, PromptLogprobs, RowStart, StepPlan
from engine.rows import Rows
from engine.sequence import Sequence, SequenceGroup


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


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was handed out: whom its samples and prompt logprobs belong to."""

    samples: list[Sequence]
    prompt_logprobs: list[WantedPromptLogprobs]
    filled: list[tuple[Sequence, int]]  # sequences that filled blocks, and how many they have filled by then
    moves: Moves
    arrivals: list[SequenceGroup]  # groups whose blocks are where they should be once it is committed


@dataclass(slots=True)
class StepDraft:
    """What the step does besides its decodes."""

    budget: int = 0  # tokens still to give away
    prefills: list[Prefill] = field(default_factory=list)
    starts: list[RowStart] = field(default_factory=list)
    preempted: set[int] = field(default_factory=set)  # rows
    stalled: set[int] = field(default_factory=set)  # rows that wait for blocks in transfer
    promised: int = 0  # blocks in transfer that those rows will take
    arrivals: list[SequenceGroup] = field(default_factory=list)
    brought: list[tuple[Sequence, int]] = field(default_factory=list)  # full blocks that come from the host

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
                output=sequence.tokens[group.num_prompt :] if penalised else [],
                num_candidates=group.beams.num_candidates if group.beams is not None else 0,
            )
        )

    def forget_preempted(self) -> None:
        """Drop all that was drafted for rows that yielded."""
        self.prefills = [prefill for prefill in self.prefills if prefill.row not in self.preempted]

    def build(
        self, rows: Rows, decodes: Int32, moves: Moves, given: dict[int, int], block_size: int
    ) -> tuple[StepPlan, Flight]:
        """The plan, and what to remember of it. `rows` are as they will be once the step is done."""
        samples = [rows.sequences[row] for row in decodes.tolist()]
        sample_tokens = list(range(len(decodes)))
        wanted: list[WantedPromptLogprobs] = []
        asked: list[PromptLogprobs] = []
        tokens: list[int] = []
        for prefill in self.prefills:
            first_token = len(decodes) + len(tokens)
            tokens += prefill.sequence.tokens[prefill.start : prefill.end]
            samples += prefill.samples
            sample_tokens += [len(decodes) + len(tokens) - 1] * len(prefill.samples)
            run = _prompt_logprobs(prefill)
            if run is not None:
                wanted.append(run)
                k = run.group.request.params.prompt_logprobs or 0
                asked.append(
                    PromptLogprobs(
                        first_token + run.first_target - 1 - prefill.start, np.array(run.targets, np.int32), k
                    )
                )
        prefill_rows = np.array([prefill.row for prefill in self.prefills], np.int32)
        lengths = np.array([prefill.end - prefill.start for prefill in self.prefills], np.int32)
        all_rows = np.concatenate([decodes, prefill_rows])
        sequences = [sequence for sequence in samples if sequence is not None]
        assert len(sequences) == len(samples), "a decode was scheduled on an empty row"
        sample_rows = np.array([sequence.row for sequence in sequences], np.int32)
        table = np.array([(*key, block) for key, block in moves.entries.items()], np.int32).reshape(-1, 3)
        filled_rows = decodes[rows.context[decodes] % block_size == 0].tolist()
        filled = [(rows.sequences[row], int(rows.context[row]) // block_size) for row in filled_rows]
        filled += [(prefill.sequence, prefill.end // block_size) for prefill in self.prefills]
        plan = StepPlan(
            rows=all_rows,
            num_decodes=len(decodes),
            query_lens=np.concatenate([np.ones(len(decodes), np.int32), lengths]),
            context_lens=rows.context[all_rows],
            prefill_tokens=np.array(tokens, np.int32),
            starts=tuple(self.starts),
            given_rows=np.array(list(given), np.int32),
            given_tokens=np.array(list(given.values()), np.int32),
            table_rows=table[:, 0],
            table_columns=table[:, 1],
            table_blocks=table[:, 2],
            copies=_pairs([(source, destination) for _, source, destination in moves.copies]),
            swap_out=_pairs([(t.device, t.host) for t in (*moves.swap_out, *moves.spills)]),
            swap_in=_pairs([(t.host, t.device) for t in moves.swap_in]),
            sample_rows=sample_rows,
            sample_tokens=np.array(sample_tokens, np.int32),
            sample_positions=rows.context[sample_rows],
            prompt_logprobs=tuple(asked),
        )
        whose = [(sequence, count) for sequence, count in filled if sequence is not None]
        return plan, Flight(sequences, wanted, whose + self.brought, moves, self.arrivals)


def _pairs(pairs: list[tuple[int, int]]) -> Int32:
    return np.array(pairs, np.int32).reshape(-1, 2)


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
