"""Commit the beams of a step: choose among their candidates, re-parent their tables, end their searches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Logprobs
from quire.engine.memory.manager import BlockManager
from quire.engine.messages import FinishReason, Output
from quire.engine.sequences.beam_search import BeamStep, Hypothesis, advance_all
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import NO_ROW, BeamGroup, Sequence


def choose(groups: list[BeamGroup]) -> list[BeamStep | None]:
    """Return the selection of each of these groups, which have all candidates and one `batch_key`.

    It is None where a candidate is NaN.
    """
    for beams in groups:
        beams.pending = False
    shape = len(groups), len(groups[0].order), groups[0].num_candidates
    tokens, logprobs = _gather([each for beams in groups for each in beams.candidates], shape[2])
    searches = [beams.search for beams in groups]
    return advance_all(searches, tokens.reshape(shape), logprobs.reshape(shape))


def _gather(
    candidates: list[tuple[Logprobs, int]], count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return tokens and log-probabilities [N, count], of one step, or of several where some groups waited."""
    rows = [row for _, row in candidates]
    sources = {id(source): source for source, _ in candidates}
    if len(sources) == 1:
        (source,) = sources.values()
        return source.top_tokens[rows, :count], source.top_logprobs[rows, :count]
    tokens = np.stack([source.top_tokens[row, :count] for source, row in candidates])
    return tokens, np.stack([source.top_logprobs[row, :count] for source, row in candidates])


def reparent(
    beams: BeamGroup, step: BeamStep, blocks: BlockManager, rows: Rows
) -> tuple[list[Sequence], bool]:
    """Have each chosen beam continue its parent: the first child in the parent's row, others follow it.

    Return the sequences that no beam goes on in, and whether any two share the block that they write next.
    Those in `order` have yet to take their tokens.
    Tables are re-parented by reference counts; at most one block a beam is copied, that which it writes
    next (section 4.4, Fig. 9). Of a group that was preempted meanwhile it is the tables in host memory.
    """
    parents = [beams.order[parent] for parent in step.parents]
    unused = [sequence for sequence in beams.group.sequences if sequence not in parents]
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
    beams.continue_with(order)
    return unused, shares


def outputs_of(beams: BeamGroup) -> list[Output]:
    """Return what the finished search gives: one output a hypothesis, best first."""
    request = beams.group.request
    outputs = [_output(request.id, i, hypothesis) for i, hypothesis in enumerate(beams.search.result())]
    # Where fewer sequences exist than were asked for, the rest are empty.
    return outputs + [ending(beams, index, "stop") for index in range(len(outputs), request.params.n)]


def ending(beams: BeamGroup, index: int, reason: FinishReason, error: str | None = None) -> Output:
    return Output(beams.group.request.id, index, [], finish_reason=reason, error=error)


def _output(request_id: int, index: int, hypothesis: Hypothesis) -> Output:
    return Output(
        request_id,
        index,
        hypothesis.tokens,
        finish_reason=hypothesis.finish_reason,
        stop_token=hypothesis.stop_token,
        cumulative_logprob=hypothesis.cumulative_logprob,
    )
