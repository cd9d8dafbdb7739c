"""Commit the beams of a step: choose among their candidates, re-parent their tables, end their searches."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Logprobs, joined
from quire.engine.memory.manager import BlockManager
from quire.engine.messages import FinishReason, Output
from quire.engine.schedule.lifecycle import expect_write, finish
from quire.engine.schedule.outputs import describe_first
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.beam_search import NOT_A_NUMBER, BeamStep, Hypothesis, advance_all
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import NO_ROW, BeamGroup, Sequence, SequenceGroup

NOBODY = -1


def commit_beams(state: SchedulerState, groups: list[BeamGroup]) -> list[Output]:
    """Have the chosen beams of these groups, which have all candidates, go on, or end their searches.

    Return what ends by it.
    """
    outputs: list[Output] = []
    chosen: list[tuple[BeamGroup, BeamStep]] = []
    alike: defaultdict[tuple[int, ...], list[BeamGroup]] = defaultdict(list)
    for beams in groups:
        alike[beams.batch_key].append(beams)
    steps = [pair for each in alike.values() for pair in zip(each, _choose(each), strict=True)]
    for beams, step in steps:
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
        group, sequences, indices = beams.group, beams.group.sequences, beams.indices
        group.forked = True
        if sequences[0].row == NO_ROW:  # the group was preempted, and waits
            for sequence, token in zip(beams.order, step.tokens, strict=True):
                sequence.append(token)
            continue
        rows += [sequences[i].row for i in indices]
        tokens += step.tokens
        if len(indices) < len(sequences):
            for sequence in sequences:
                if sequence.index not in indices:
                    state.rows.set_decoding(sequence, False)
                    state.shared_tails.pop(sequence.row, None)
        if group in shares:
            for sequence in beams.order:
                state.shared_tails.pop(sequence.row, None)
                expect_write(state, sequence)
    state.rows.resume(rows, tokens)
    return outputs


def _choose(groups: list[BeamGroup]) -> list[BeamStep | None]:
    """Return the selection of each of these groups, which have all candidates and one `batch_key`.

    It is None where a candidate is NaN.
    """
    for beams in groups:
        beams.pending = False
    shape = len(groups), max(len(beams.indices) for beams in groups), groups[0].num_candidates
    tokens, logprobs = _gather(groups, *shape[1:])
    searches = [beams.search for beams in groups]
    return advance_all(searches, tokens.reshape(shape), logprobs.reshape(shape))


def _gather(groups: list[BeamGroup], most: int, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return tokens and log-probabilities [N, count], of one step, or of several where some groups waited.

    They are those of `most` beams of each group: of one with fewer, a beam's stand for those it has not.
    """
    sources: list[Logprobs] = []
    rows: list[int] = []
    for beams in groups:
        assert beams.candidates is not None
        source, row_of = beams.candidates
        sources.append(source)
        rows += [row_of[i] for i in beams.indices]
        if len(beams.indices) < most:
            rows += rows[-1:] * (most - len(beams.indices))
    index = np.array(rows)
    if any(source is not sources[0] for source in sources):
        parts = zip(sources, index.reshape(len(groups), -1), strict=True)
        sources, index = [joined([source.of(each, count) for source, each in parts])], np.arange(len(rows))
    top = sources[0].top_tokens, sources[0].top_logprobs
    return top[0].take(index, axis=0)[:, :count], top[1].take(index, axis=0)[:, :count]


def reparent(
    chosen: list[tuple[BeamGroup, BeamStep]], blocks: BlockManager, rows: Rows
) -> set[SequenceGroup]:
    """Have each chosen beam continue its parent: the first child in the parent's row, others follow it.

    Return the groups in which beams share the block that they write next. Those in `order` have yet to take
    their tokens.
    Tables are re-parented by reference counts; at most one block a beam is copied, that which it writes
    next (section 4.4, Fig. 9). Of a group that was preempted meanwhile it is the tables in host memory.
    """
    follows, unused = _continue(chosen) if chosen else ([], [])
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
    chosen: list[tuple[BeamGroup, BeamStep]],
) -> tuple[list[tuple[Sequence, Sequence]], list[Sequence]]:
    """Make the children of the chosen beams the live ones, all groups' at once.

    Return who follows whom, and the sequences that no beam goes on in.
    """
    sequences: list[Sequence] = []  # of all groups
    parents: list[int] = []  # of as many children; NOBODY of those that a group might have had
    for beams, step in chosen:
        first, own, indices = len(sequences), beams.group.sequences, beams.indices
        sequences += own
        parents += [first + indices[place] for place in step.parents]
        if len(step.parents) < len(own):
            parents += [NOBODY] * (len(own) - len(step.parents))
    parent_of, children = np.array(parents, np.intp), np.arange(len(parents))
    first_child = np.full(len(parents) + 1, NOBODY)
    first_child[parent_of[::-1]] = children[::-1]  # of several the one that is assigned last
    follows = (first_child[parent_of] != children) | (parent_of == NOBODY)
    # In each group as many sequences are left without a child as there are children that follow.
    in_sequence = np.where(follows, NOBODY, parent_of)
    in_sequence[follows] = (first_child[:-1] == NOBODY).nonzero()[0]
    child_in = [sequences[i].index for i in in_sequence.tolist()]
    begin = 0
    for beams, step in chosen:
        beams.continue_with(child_in[begin : begin + len(step.parents)])
        begin += len(beams.group.sequences)
    pairs = [*zip(parent_of[follows].tolist(), in_sequence[follows].tolist(), strict=True)]
    return [(sequences[parent], sequences[child]) for parent, child in pairs if parent != NOBODY], [
        sequences[child] for parent, child in pairs if parent == NOBODY
    ]


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
