"""The life of a request: it waits, runs, is preempted and waits again, and finishes."""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from operator import attrgetter

from quire.engine.messages import FinishReason, Request
from quire.engine.records import Preemption
from quire.engine.schedule.draft import StepDraft
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.grammar import Constraint
from quire.engine.sequences.sequence import NO_ROW, BeamGroup, Sequence, SequenceGroup


def queue_request(state: SchedulerState, request: Request, constraint: Constraint | None = None) -> None:
    """Have a request wait, with its grammar's beginning. Raises ValueError when it could never run."""
    request = state.capacity.without_padding(request)
    prompt = state.capacity.check(request)
    assert request.id not in state.groups, f"request id {request.id} is already in use"
    group = SequenceGroup(request, prompt, state.num_arrivals, state.eos_token_ids)
    if request.params.beam_width:
        group.beams = BeamGroup(group, state.capacity.vocab_size)
    if constraint is not None:
        for sequence in group.sequences:
            sequence.constraint = constraint.fork()
    state.num_arrivals += 1
    state.num_in_lockstep += group.in_lockstep
    for token in group.stop_tokens:
        state.ending_at[token] += 1
    now = state.clock()
    if request.params.grammar:
        group.timeline.name = "grammar"
        group.timeline.enter("queue", now)
    if not state.waiting:
        state.queue_waits.end(now)
    group.timeline.waited_before = state.queue_waits.read(now)
    group.timeline.queued_behind = len(state.waiting)
    state.groups[request.id] = group
    state.alive.add(group)
    state.waiting.append(group)


def start(state: SchedulerState, group: SequenceGroup, draft: StepDraft) -> None:
    """Give rows to a group that waits."""
    state.waiting.remove(group)
    state.running.append(group)
    group.timeline.come_back(state.clock())
    for sequence in group.live:
        state.rows.assign(sequence)
        draft.start(sequence)


def preempt(state: SchedulerState, group: SequenceGroup, *, swapped: bool) -> Preemption:
    """Take rows and device blocks from the newest running group, which waits before all newer ones.

    Return the record of it, which does not say for whom.
    """
    assert state.running.pop() is group
    for sequence in group.live:
        _leave_row(state, sequence)
    group.swapped = swapped
    state.num_swapped += swapped
    insort(state.waiting, group, key=attrgetter("order"))
    return group.timeline.preempt(state.clock(), "swap" if swapped else "recompute", state.steps)


def swap_in(state: SchedulerState, group: SequenceGroup) -> None:
    """Bring the blocks of `group`, which has got rows, from host memory."""
    state.blocks.swap_in(group)
    group.timeline.enter("swap_in", state.clock())
    group.swapped = False
    state.num_swapped -= 1


def abort(state: SchedulerState, request_id: int) -> None:
    """Forget a request and free its blocks; what is in flight for it is dropped at its commit."""
    group = state.groups.get(request_id)
    if group is not None:
        for sequence in group.live:
            finish(state, sequence, "abort")


def end_sample(state: SchedulerState, request_id: int, index: int) -> None:
    """End one sample of a request, if it is still there; the others go on."""
    group = state.groups.get(request_id)
    if group is None or group.beams is not None:  # beams end together
        return
    sequence = group.sequences[index]
    if sequence.finish_reason is None:
        finish(state, sequence, "stop")


def finish(state: SchedulerState, sequence: Sequence, reason: FinishReason) -> None:
    """End one sequence, running or waiting; its group ends with its last sequence."""
    assert sequence.finish_reason is None
    sequence.finish_reason = reason
    group = sequence.group
    if reason == "error":
        state.blocks.forget(sequence)
    queue = state.waiting if sequence.row == NO_ROW else state.running
    if sequence.row != NO_ROW:
        _leave_row(state, sequence)
    state.blocks.end(sequence)
    state.pending_masks.drop(sequence)
    if sequence in group.prefill_queue:
        group.prefill_queue.remove(sequence)
    if not group.live:
        queue.remove(group)
        _end_group(state, group, reason)


def _end_group(state: SchedulerState, group: SequenceGroup, reason: FinishReason) -> None:
    del state.groups[group.request.id]
    state.stalled.discard(group)
    tokens = group.num_prompt, group.cached_tokens, group.cached_host_tokens
    state.records.append(group.timeline.end(group.request.id, state.clock(), reason, state.steps, tokens))
    state.num_in_lockstep -= group.in_lockstep
    state.num_swapped -= group.swapped
    for token in group.stop_tokens:
        state.ending_at[token] -= 1
    group.end()


def _leave_row(state: SchedulerState, sequence: Sequence) -> None:
    for step in state.in_flight:
        step.forget_row(sequence)
    state.blocks.free(sequence)
    state.shared_tails.pop(sequence.row, None)
    state.pending_masks.leave(sequence)
    state.rows.release(sequence)


def expect_write(state: SchedulerState, sequence: Sequence) -> None:
    """Note that `sequence` needs a copy of the block it writes into next, if that is not its own."""
    context = state.rows.context.item(sequence.row)
    if context % state.blocks.block_size and not state.blocks.is_writable(sequence, context):
        state.shared_tails[sequence.row] = sequence


def pin(state: SchedulerState, tokens: list[int]) -> None:
    """Never evict the blocks of `tokens`, which are open to all and cached."""
    for block in state.blocks.contents.pinned_blocks(state.blocks.contents.open_to_all(tokens)):
        state.blocks.pool.pin(block)
    for block in state.blocks.tails.blocks():
        state.blocks.pool.pin(block)
    others = state.blocks.pool.num_blocks - state.blocks.pool.num_pinned
    state.capacity = replace(state.capacity, num_blocks=others)
