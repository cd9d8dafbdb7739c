"""What the scheduler notes of groups that wait, and of what was not found for them, for their records."""

from __future__ import annotations

from itertools import islice

import msgspec

from quire.engine.memory.prefix_cache import Found
from quire.engine.records import Miss, Wait, WaitReason
from quire.engine.schedule.draft import StepDraft
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.sequence import Sequence, SequenceGroup

MAX_HOLDERS = 8  # requests that are named of those that one waits for


def note_wait(state: SchedulerState, reason: WaitReason, needed: int = 0) -> None:
    """Note what the head of the queue, if there is one, waits for. needed: blocks, if it is for blocks."""
    waits = state.queue_waits
    if not state.waiting:
        waits.end(state.clock())
    elif reason != waits.reason:
        pool, rows, of_rows = state.blocks.pool, state.rows, reason == "sequences"
        wait = Wait(
            reason,
            running=len(state.running),
            holders=[group.request.id for group in islice(state.running, MAX_HOLDERS)],
            held=rows.num_used if of_rows else pool.num_active,
            total=rows.size if of_rows else pool.num_blocks,
            needed=needed,
        )
        waits.begin(wait, state.clock())


def note_stalled(state: SchedulerState, draft: StepDraft) -> None:
    """Note which running groups wait for blocks in this step, and which no longer do."""
    now = state.clock()
    sequences = [state.rows.sequences[row] for row in draft.stalled]
    stalled = {sequence.group for sequence in sequences if sequence is not None}
    for group in stalled - state.stalled:
        group.timeline.enter("waiting_for_blocks", now)
    for group in state.stalled - stalled:
        if group.timeline.name == "waiting_for_blocks" and not group.prefill_queue:
            group.timeline.enter("decode", now)
    state.stalled = stalled


def note_admission(state: SchedulerState, group: SequenceGroup, found: Found) -> None:
    """Note that a group runs for the first time, with what was found of its prompt."""
    now, timeline = state.clock(), group.timeline
    timeline.admit(now, state.queue_waits.since(timeline.waited_before, now))
    timeline.miss = _miss(state, group.in_cache[0], found)


def _miss(state: SchedulerState, sequence: Sequence, found: Found) -> Miss | None:
    """Say why what follows `found` was not; None if the whole prompt was, but for its last token."""
    group, blocks = sequence.group, state.blocks
    token = found.num_tokens(blocks.block_size)
    if not blocks.has_prefix_cache:
        return Miss("off", token)
    if token >= group.num_prompt - 1:
        return None
    if group.prompt_logprobs is not None:
        return Miss("prompt_logprobs", token)
    miss = blocks.contents.explain_miss(sequence, len(found))
    return miss if found.tail is None else msgspec.structs.replace(miss, token=token)
