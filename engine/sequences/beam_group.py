"""A request's beams while the search runs: whose candidates are in, and which row each chosen one takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Logprobs
from quire.engine.memory.manager import BlockManager
from quire.engine.messages import FinishReason, Output
from quire.engine.sequences.beam_search import BeamSearch, BeamStep, Hypothesis, advance_all
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import NO_ROW, Sequence, SequenceGroup

NO_LOGPROBS = Logprobs(
    np.empty(0, np.float32), np.empty(0, np.int32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)
)


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
        self._candidates: list[tuple[Logprobs, int]] = [(NO_LOGPROBS, 0)]  # as in `order`; of which row
        self._missing = {group.sequences[0].index: 0}  # beams without candidates -> place in `order`

    def collect(self, sequence: Sequence, logprobs: Logprobs, i: int) -> bool:
        """Take row i of `logprobs` as the candidates of `sequence`: have all beams theirs now?"""
        place = self._missing.pop(sequence.index, None)
        if place is None:  # it yielded while others' were missing, and was computed again
            return False
        self._candidates[place] = logprobs, i
        return not self._missing

    @property
    def likeness(self) -> tuple[int, int, int, int]:
        """What groups have in common that may advance together."""
        search = self.search
        return search.width, len(search.stop_tokens), len(self.order), self.num_candidates

    def reparent(self, step: BeamStep, blocks: BlockManager, rows: Rows) -> tuple[list[Sequence], bool]:
        """Each chosen beam continues its parent: the first child in the parent's row, others follow it.

        -> the sequences that no beam goes on in, and whether any two share the block that they write next.
        Those in `order` have yet to take their tokens.
        Tables are re-parented by reference counts; at most one block a beam is copied, that which it writes
        next (section 4.4, Fig. 9). Of a group that yielded meanwhile it is the tables in host memory.
        """
        parents = [self.order[parent] for parent in step.parents]
        unused = [sequence for sequence in self.group.sequences if sequence not in parents]
        order: list[Sequence] = []
        shares = False
        for parent in parents:
            child = parent if parent not in order else unused.pop(0)
            if child is not parent:
                child.take_tokens(parent)
                if parent.row == NO_ROW:
                    blocks.host.fork(parent, child)
                else:
                    shares |= blocks.follow(parent, child)
                    rows.context[child.row] = rows.context.item(parent.row)
            order.append(child)
        for sequence in unused:
            if sequence.row == NO_ROW:
                blocks.host.drop(sequence)
            else:
                blocks.free(sequence)
                rows.context[sequence.row] = 0
        self.order = order
        self._missing = {beam.index: place for place, beam in enumerate(order)}
        self._candidates = [(NO_LOGPROBS, 0)] * len(order)
        return unused, shares

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
    shape = len(groups), len(groups[0].order), groups[0].num_candidates
    tokens, logprobs = _gathered([each for beams in groups for each in beams._candidates], shape[2])
    searches = [beams.search for beams in groups]
    return advance_all(searches, tokens.reshape(shape), logprobs.reshape(shape))


def _gathered(
    candidates: list[tuple[Logprobs, int]], count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """[N, count] tokens and log-probabilities, of one step, or of several where some groups had to wait."""
    rows = [row for _, row in candidates]
    sources = {id(source): source for source, _ in candidates}
    if len(sources) == 1:
        (source,) = sources.values()
        return source.top_tokens[rows, :count], source.top_logprobs[rows, :count]
    tokens = np.stack([source.top_tokens[row, :count] for source, row in candidates])
    return tokens, np.stack([source.top_logprobs[row, :count] for source, row in candidates])
