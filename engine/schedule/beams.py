"""Commit the beams of a step: choose among their candidates, re-parent their tables, end their searches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Logprobs
from quire.engine.memory.manager import BlockManager
from quire.engine.messages import FinishReason, Output
from quire.engine.schedule.lifecycle import expect_write, finish
from quire.engine.schedule.outputs import describe_first
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.beam_search import NOT_A_NUMBER, BeamStep, Hypothesis, advance_all
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import NO_ROW, BeamGroup, Sequence, SequenceGroup


def commit_beams(state: SchedulerState, groups: list[BeamGroup]) -> list[Output]:
    """Have the chosen beams of these groups go on, or end their searches; return what ends by it.

    The groups have all candidates and one `batch_key`.
    """
    outputs: list[Output] = []
    continuing: list[Sequence] = []
    tokens: list[int] = []
    shares = bool(state.shared_tails)
    for beams, step in zip(groups, _choose(groups), strict=True):
        group = beams.group
        if step is None:
            errors = [_ending(beams, i, "error", NOT_A_NUMBER) for i in range(group.request.params.n)]
            outputs += _end_search(state, group, errors, "error")
        elif beams.search.done:
            outputs += _end_search(state, group, _outputs_of(beams), "stop")
        else:
            unused, some_share = reparent(beams, step, state.blocks, state.rows)
            shares |= some_share
            group.forked = True
            if beams.order[0].row == NO_ROW:  # the group was preempted, and waits
                for sequence, token in zip(beams.order, step.tokens, strict=True):
                    sequence.append(token)
                continue
            continuing += beams.order
            tokens += step.tokens
            for sequence in unused:
                state.rows.set_decoding(sequence, False)
                state.shared_tails.pop(sequence.row, None)
    rows = [sequence.row for sequence in continuing]
    state.rows.resume(rows, tokens)
    state.overrides.update(zip(rows, tokens, strict=True))
    if shares:  # else all of them write to blocks of their own, as nearly always
        for sequence in continuing:
            state.shared_tails.pop(sequence.row, None)
            expect_write(state, sequence)
    return outputs


def _choose(groups: list[BeamGroup]) -> list[BeamStep | None]:
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


def _end_search(
    state: SchedulerState, group: SequenceGroup, outputs: list[Output], reason: FinishReason
) -> list[Output]:
    describe_first(state, group, outputs[0])
    for sequence in group.live:
        finish(state, sequence, reason)
    return outputs


def _outputs_of(beams: BeamGroup) -> list[Output]:
    """Return what the finished search gives: one output a hypothesis, best first."""
    request = beams.group.request
    outputs = [_output(request.id, i, hypothesis) for i, hypothesis in enumerate(beams.search.result())]
    # Where fewer sequences exist than were asked for, the rest are empty.
    return outputs + [_ending(beams, index, "stop") for index in range(len(outputs), request.params.n)]


def _ending(beams: BeamGroup, index: int, reason: FinishReason, error: str | None = None) -> Output:
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
