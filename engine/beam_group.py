"""A request's beams while the search runs: whose candidates are in, and which row each chosen one takes."""

from __future__ import annotations

import numpy as np

from engine.beam import BeamSearch, BeamStep, Hypothesis, advance_all
from engine.block_manager import BlockManager
from engine.plan import Logprobs
from engine.request import FinishReason, Output
from engine.rows import Rows
from engine.sequence import NO_ROW, Sequence, SequenceGroup


class BeamGroup:
    """`order` are the live beams, best first. A step's selection waits until all of them have candidates."""

    def __init__(self, group: SequenceGroup, vocab_size: int) -> None:
        params = group.request.params
        self.search = BeamSearch(
            params.beam_width,
            params.n,
            params.max_tokens,
            group.stop_tokens,
            params.length_penalty,
            params.early_stopping,
            params.min_tokens,
        )
        self.group = group
        self.num_candidates = min(self.search.candidates_per_beam, vocab_size)
        self.order = group.sequences[:1]
        self.pending = False  # candidates are in flight, or wait for those of other beams
        shape = (params.beam_width, self.num_candidates)
        self._tokens, self._logprobs = np.empty(shape, np.int32), np.empty(shape, np.float32)  # as in `order`
        self._missing = {group.sequences[0].index: 0}  # beams without candidates -> place in `order`

    def collect(self, sequence: Sequence, logprobs: Logprobs, i: int) -> bool:
        """Take row i of `logprobs` as the candidates of `sequence`: have all beams theirs now?"""
        place = self._missing.pop(sequence.index, None)
        if place is None:  # it yielded while others' were missing, and was computed again
            return False
        self._tokens[place] = logprobs.top_tokens[i, : self.num_candidates]
        self._logprobs[place] = logprobs.top_logprobs[i, : self.num_candidates]
        return not self._missing

    @property
    def likeness(self) -> tuple[int, int, int, int]:
        """What groups have in common that may advance together."""
        search = self.search
        return search.width, len(search.stop_tokens), len(self.order), self.num_candidates

    def reparent(self, step: BeamStep, blocks: BlockManager, rows: Rows) -> list[Sequence]:
        """Each chosen beam continues its parent: the first child in the parent's row, others by a fork.

        -> the sequences that no beam goes on in.
        Tables are re-parented by reference counts alone; the next write copies at most one block a beam
        (section 4.4, Fig. 9). Of a group that yielded meanwhile it is the tables in host memory.
        """
        parents = [self.order[parent] for parent in step.parents]
        unused = [sequence for sequence in self.group.sequences if sequence not in parents]
        for sequence in unused:
            if sequence.row == NO_ROW:
                blocks.host.drop(sequence)
            else:
                blocks.free(sequence)
                rows.context[sequence.row] = 0
        order: list[Sequence] = []
        for parent in parents:
            child = parent if parent not in order else unused.pop(0)
            if child is not parent:
                child.tokens = parent.tokens
                child.prefixes = list(parent.prefixes)
                if parent.row == NO_ROW:
                    blocks.host.fork(parent, child)
                else:
                    blocks.fork(parent, child)
                    child.published = parent.published
                    rows.context[child.row] = rows.context[parent.row]
            order.append(child)
        for child, token in zip(order, step.tokens, strict=True):
            child.append(token)
        self.order = order
        self._missing = {beam.index: place for place, beam in enumerate(order)}
        return unused

    def outputs(self) -> list[Output]:
        """What the finished search gives: one output a hypothesis, best first."""
        hypotheses = self.search.result()
        outputs = [self._output(index, hypothesis) for index, hypothesis in enumerate(hypotheses)]
        # Where fewer sequences exist than were asked for, the rest are empty.
        missing = range(len(outputs), self.group.request.params.n)
        return outputs + [self.ending(index, "stop") for index in missing]

    def ending(self, index: int, reason: FinishReason, error: str | None = None) -> Output:
        return Output(self.group.request.id, index, [], finish_reason=reason, error=error)

    def _output(self, index: int, hypothesis: Hypothesis) -> Output:
        return Output(
            self.group.request.id,
            index,
            hypothesis.tokens,
            finish_reason=hypothesis.finish_reason,
            stop_token=hypothesis.stop_token,
            cumulative_logprob=hypothesis.cumulative_logprob,
        )


def advance_together(groups: list[BeamGroup]) -> list[BeamStep | None]:
    """One selection for each of these, which are alike and have all candidates; None where one is NaN."""
    for beams in groups:
        beams.pending = False
    live = len(groups[0].order)
    return advance_all(
        [beams.search for beams in groups],
        np.stack([beams._tokens[:live] for beams in groups]),
        np.stack([beams._logprobs[:live] for beams in groups]),
    )
