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
    chosen: list[tuple[BeamGroup, BeamStep]] = []
    for beams, step in zip(groups, _choose(groups), strict=True):
        group = beams.group
        if step is None:
            errors = [_ending(beams, i, "error", NOT_A_NUMBER) for i in range(group.request.params.n)]
            outputs += _end_search(state, group, errors, "error")
        elif beams.search.done:
            outputs += _end_search(state, group, _outputs_of(beams), "stop")
        else:
            chosen.append((beams, step))
    # Nearly always each beam writes to a block of its own, and nobody is looked at.
    shares = {sequence.group for sequence in state.shared_tails.values()}
    shares |= reparent(chosen, state.blocks, state.rows)
    rows: list[int] = []
    tokens: list[int] = []
    for beams, step in chosen:
        group, order = beams.group, beams.order
        group.forked = True
        if order[0].row == NO_ROW:  # the group was preempted, and waits
            for sequence, token in zip(order, step.tokens, strict=True):
                sequence.append(token)
            continue
        rows += [sequence.row for sequence in order]
        tokens += step.tokens
        if len(order) < len(group.sequences):
            for sequence in group.sequences:
                if sequence not in order:
                    state.rows.set_decoding(sequence, False)
                    state.shared_tails.pop(sequence.row, None)
        if group in shares:
            for sequence in order:
                state.shared_tails.pop(sequence.row, None)
                expect_write(state, sequence)
    state.rows.resume(rows, tokens)
    state.overrides.update(zip(rows, tokens, strict=True))
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
    source, _ = candidates[0]
    if all(each is source for each, _ in candidates):
        return source.top_tokens[rows, :count], source.top_logprobs[rows, :count]
    tokens = np.stack([source.top_tokens[row, :count] for source, row in candidates])
    return tokens, np.stack([source.top_logprobs[row, :count] for source, row in candidates])


def reparent(
    chosen: list[tuple[BeamGroup, BeamStep]], blocks: BlockManager, rows: Rows
) -> set[SequenceGroup]:
    """Have each chosen beam continue its parent: the first child in the parent's row, others follow it.

    Return the groups in which beams share the block that they write next. Those in `order` have yet to take
    their tokens.
    Tables are re-parented by reference counts; at most one block a beam is copied, that which it writes
    next (section 4.4, Fig. 9). Of a group that was preempted meanwhile it is the tables in host memory.
    """
    follows: list[tuple[Sequence, Sequence]] = []
    unused: list[Sequence] = []
    for beams, step in chosen:
        unused += _continue(beams, step.parents, follows)
    for parent, child in follows:
        if parent.row == NO_ROW:
            child.take_tokens(parent)
            blocks.host.fork(parent, child)
    follows = [(parent, child) for parent, child in follows if parent.row != NO_ROW]
    rows.tokens.copy_all([parent.row for parent, _ in follows], [child.row for _, child in follows])
    shares = {child.group for child in blocks.follow_all(follows)}
    for sequence in unused:
        if sequence.row == NO_ROW:
            blocks.host.drop(sequence)
        else:
            blocks.free(sequence)
            rows.context[sequence.row] = 0
    return shares


def _continue(
    beams: BeamGroup, chosen: list[int], follows: list[tuple[Sequence, Sequence]]
) -> list[Sequence]:
    """Make the children of the chosen beams, by their places, the live ones.

    Add to `follows` who follows whom, and return the sequences that no beam goes on in.
    """
    before, sequences = beams.order, beams.group.sequences
    order = [before[place] for place in chosen]
    parents = set(chosen)
    spare: list[Sequence] = []
    if len(parents) < len(sequences):
        continued = {before[place].index for place in parents}
        spare = [sequence for sequence in sequences if sequence.index not in continued]
    children = iter(spare)
    for i, place in enumerate(chosen if spare else ()):
        if place in parents:
            parents.remove(place)  # the first child, which stays where its parent is
        else:
            child = next(children)
            follows.append((order[i], child))
            order[i] = child
    beams.continue_with(order)
    return list(children)


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
