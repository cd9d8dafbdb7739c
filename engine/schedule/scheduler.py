"""Continuous batching: which tokens of which sequences the next step computes.

First come, first served, at the granularity of one step (PagedAttention, sections 4.4 and 4.5). Running
decodes come first, then prefill chunks of running groups, then waiting groups, under one token budget.
Deterministic: the same calls in the same order give the same plans.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from quire.engine.capacity import Capacity
from quire.engine.hashing import BlockHasher
from quire.engine.memory.prefix_cache import Found
from quire.engine.messages import Request, StepOutputs
from quire.engine.schedule import lifecycle
from quire.engine.schedule.commit import commit
from quire.engine.schedule.draft import Prefill, StepDraft
from quire.engine.schedule.finding import (
    attach,
    begin_later,
    blocks_to_come,
    blocks_to_find,
    blocks_to_resume,
    find,
    is_whole,
)
from quire.engine.schedule.notes import note_admission, note_stalled, note_wait
from quire.engine.schedule.plan import StepPlan, StepResult
from quire.engine.schedule.preemption import Grant, Preemption, PreemptionPolicy
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.grammar import Constraint
from quire.engine.sequences.rows import Index
from quire.engine.sequences.sequence import Sequence, SequenceGroup

WATERMARK = 0.01  # share of the blocks that admission leaves to those already running
MAX_SPILLS = 64  # cached blocks of a group that a step looks at to copy to host memory before eviction


class Scheduler:
    """Fills each step from the queue: `add` and `abort` at any time, `schedule` and `commit` in turn."""

    def __init__(
        self,
        capacity: Capacity,
        max_num_batched_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        *,
        hasher: BlockHasher | None = None,
        num_host_blocks: int = 0,
        policy: PreemptionPolicy | None = None,
    ) -> None:
        """Without a hasher there is no prefix cache, without host blocks nothing is swapped or spilled."""
        self.state = SchedulerState(capacity, eos_token_ids, hasher, num_host_blocks)
        self.rows = self.state.rows
        self.blocks = self.state.blocks
        self.preemption = Preemption(self.state, policy or PreemptionPolicy())
        self.max_num_batched_tokens = max_num_batched_tokens
        self.blocks_swapped_out = 0  # since start, spilled ones included
        self.blocks_swapped_in = 0
        steps_ahead = max_num_batched_tokens // capacity.block_size + capacity.max_num_seqs
        reserve = min(capacity.num_blocks // 2, steps_ahead * capacity.pages)
        self._spill_reserve = reserve if num_host_blocks else 0
        self._most_spills = MAX_SPILLS * capacity.pages
        self._watermark = int(capacity.num_blocks * WATERMARK)

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        """Queue a request, with its grammar's beginning. Raises ValueError when it could never run."""
        lifecycle.queue_request(self.state, request, constraint)

    def abort(self, request_id: int) -> None:
        """Forget a request and free its blocks; what is in flight for it is dropped at its commit."""
        lifecycle.abort(self.state, request_id)

    def end_sample(self, request_id: int, index: int) -> None:
        """Sample no further token of one of a request's samples; what is in flight for it is dropped."""
        lifecycle.end_sample(self.state, request_id, index)

    @property
    def has_work(self) -> bool:
        state = self.state
        return bool(state.waiting or state.running or state.in_flight or state.transfers)

    def commit(self, result: StepResult) -> StepOutputs:
        """Book what the oldest step in flight gave."""
        return commit(self.state, result)

    # -- one step -----------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0, only: Collection[SequenceGroup] | None = None) -> StepPlan | None:
        """Return the next step's plan, or None when nothing can run before a commit or the end of a transfer.

        `now`: monotonic seconds. `only`: of those that wait, no others are let in.
        """
        self.blocks.ring.begin_step(now, len(self.state.waiting) - self.state.num_swapped)
        draft = StepDraft(gathers=any(step.in_lockstep for step in self.state.in_flight))
        decodes = self._schedule_decodes(draft)
        draft.budget = self.max_num_batched_tokens - len(decodes)
        prefilling = self._prefilling()
        for group in prefilling:
            if not draft.holds(group):
                self._schedule_prefill(draft, group)
        if draft.preempted:
            draft.forget_preempted()
            decodes = decodes[self.rows.decoding[decodes]]
            note_wait(self.state, "blocks")
        elif draft.stalled:
            note_wait(self.state, "blocks")
        elif self.state.waiting:
            self._admit(draft, now, prefilling, only)
        if draft.stalled or self.state.stalled:
            note_stalled(self.state, draft)
        if self.blocks.pool.num_free < self._spill_reserve:
            missing = self._spill_reserve - self.blocks.pool.num_free
            self.blocks.host.spill(min(self._most_spills, missing), self.blocks.moves)
        idle = not len(decodes) and not draft.prefills
        # A group that comes back may find all its blocks on the device: nothing moves, and still it arrives.
        if idle and not draft.transferring and not self.blocks.moves.has_transfers:
            self.blocks.ring.flush()
            return None
        return self._plan(draft, decodes)

    def _plan(self, draft: StepDraft, decodes: Index) -> StepPlan:
        """Return the plan; rows and state become as they will be once the step is done."""
        state, rows = self.state, self.rows
        contexts = rows.context.take(decodes) + 1
        rows.context[decodes] = contexts
        for prefill in draft.prefills:
            for sequence in prefill.samples:
                rows.set_decoding(sequence, sequence.group.beams is None)
        moves = self.blocks.take_moves()
        self.blocks_swapped_out += len(moves.swap_out) + len(moves.spills)
        self.blocks_swapped_in += len(moves.swap_in)
        overrides = rows.take_overrides()
        steps = state.steps
        steps.steps += 1
        steps.sequences += len(decodes)
        if draft.prefills:
            steps.mixed += 1
            steps.prefilled += sum(prefill.end - prefill.start for prefill in draft.prefills)
            block_size = self.blocks.block_size
            plan, step = draft.mixed_plan(rows, decodes, contexts, moves, overrides, block_size)
            groups = [prefill.sequence.group for prefill in draft.prefills if prefill.samples]
            step.begun = [group for group in groups if not group.prefill_queue]
            for group in step.begun:
                group.timeline.count_steps(steps)
        else:
            plan, step = draft.decode_plan(rows, decodes, contexts, moves, overrides)
        state.in_flight.append(step)
        if state.num_in_lockstep:
            sampling = step.samples.row_index
            waiting = sampling[rows.in_lockstep[sampling]]
            step.in_lockstep = len(waiting) > 0
            rows.pause(waiting)
            for group in step.samples.searching:
                if group.beams is not None:
                    group.beams.pending = True
        return plan

    def _schedule_decodes(self, draft: StepDraft) -> Index:
        columns = self.rows
        rows = columns.decodes()
        if draft.gathers:
            rows = rows[~columns.in_lockstep[rows]]
        contexts = columns.context.take(rows)
        more = contexts < columns.limit.take(rows)
        full = rows[more & (contexts == columns.capacity.take(rows))]
        if np.count_nonzero(more) < len(rows):
            rows = rows[more]
        if len(full) * self.blocks.pages <= self.blocks.pool.num_available:
            self.blocks.grow_all(full)
        else:
            for row in full.tolist():
                sequence = columns.sequences[row]
                if sequence is not None:  # else it was preempted for an older one just now
                    self.preemption.ensure_capacity(draft, sequence, int(columns.context[row]) + 1)
        if self.state.shared_tails:
            self._copy_shared_tails(draft)
        if draft.preempted:
            rows = rows[columns.decoding[rows]]
        if draft.stalled:
            for row in list(draft.stalled):
                stalled = columns.sequences[row]
                if stalled is not None and stalled.group.beams is not None:  # all beams or none
                    draft.stalled |= {beam.row for beam in stalled.group.beams.order}
            rows = rows[~np.isin(rows, list(draft.stalled))]
        return rows

    def _copy_shared_tails(self, draft: StepDraft) -> None:
        columns = self.rows
        for row, sequence in sorted(self.state.shared_tails.items(), key=lambda item: item[1].group.order):
            # Not while its blocks are on their way, and not once it was preempted for an older one.
            may_decode = columns.decoding[row] and not draft.holds(sequence.group)
            if may_decode and columns.context[row] < columns.limit[row]:
                self.preemption.ensure_writable(draft, sequence, int(columns.context[row]))

    def _prefilling(self) -> list[SequenceGroup]:
        """Return running groups that are not in the cache as a whole, oldest first."""
        if len(self.rows.decodes()) == self.rows.num_used:
            return []
        return [group for group in self.state.running if group.prefill_queue]

    def _schedule_prefill(self, draft: StepDraft, group: SequenceGroup) -> None:
        """Take chunks of what `group` has not computed yet, as far as the budget and the blocks go."""
        rows, preemption = self.rows, self.preemption
        while group.prefill_queue and draft.budget and not group.transferring:
            sequence = group.prefill_queue[0]
            row = sequence.row
            if not sequence.num_blocks:
                begin_later(self.state, sequence)
            # Were all tokens found, the last one is computed all the same, for its logits.
            start = min(int(rows.context[row]), sequence.num_tokens - 1)
            end = min(sequence.num_tokens, start + draft.budget)
            grant = Grant.GRANTED
            if start < rows.capacity[row]:
                grant = preemption.ensure_writable(draft, sequence, start)
            if grant is Grant.GRANTED:
                grant = preemption.ensure_capacity(draft, sequence, end)
            if grant is Grant.PARTIAL:
                end = int(rows.capacity[row])
            elif grant is not Grant.GRANTED:
                return
            rows.context[row] = end
            draft.budget -= end - start
            done = end == sequence.num_tokens
            if done:
                group.prefill_queue.pop(0)
            samples = self._fork(sequence) if done else []
            draft.prefills.append(Prefill(sequence, start, end, samples, row))
            self.blocks.mark_computing(sequence, start, end)
            group.timeline.chunk(self.state.clock(), end - start)
            if not done:
                return

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that sample from the last logits of `sequence`, now in the cache."""
        group = sequence.group
        if group.forked or group.beams is not None:
            return [sequence]
        group.forked = True
        live = group.live
        for other in live:
            if other is not sequence:
                self.blocks.fork(sequence, other)
                self.rows.context[other.row] = self.rows.context[sequence.row]
        for other in live:
            lifecycle.expect_write(self.state, other)
        return live

    # -- letting groups in --------------------------------------------------------------------------

    def _admit(
        self,
        draft: StepDraft,
        now: float,
        prefilling: list[SequenceGroup],
        only: Collection[SequenceGroup] | None,
    ) -> None:
        """Let waiting groups in, strictly in order: those that were preempted come before all new ones."""
        state = self.state
        available = self.blocks.pool.num_available
        available -= sum(blocks_to_come(state, group) for group in prefilling)
        while draft.budget:
            group = next((each for each in state.waiting if only is None or each in only), None)
            if group is None:
                note_wait(self.state, "trials")
                return
            if group.transferring:
                note_wait(self.state, "blocks")
                return
            if draft.holds(group):
                return  # for a step: what it waited for before, if anything, says more
            spare = self._watermark if state.running else 0
            if len(group.live) > self.rows.num_free:
                note_wait(self.state, "sequences", len(group.live))
                return
            if group.swapped:
                away = {block for sequence in group.live for block in sequence.host_blocks}
                needed = max(blocks_to_resume(state, group), len(away))
                # A group that comes back and is preempted again has moved its blocks for nothing: leave a
                # block for each sequence that runs.
                spare = max(spare, self.rows.num_used) if state.running else 0
                if needed + spare > available:
                    note_wait(self.state, "blocks", needed)
                    return
                self._swap_in(draft, group)
            else:
                if spare >= available:
                    note_wait(self.state, "blocks")
                    return
                found = find(state, group.in_cache[0])
                needed = blocks_to_find(state, group, found)
                if needed + spare > available and is_whole(state, group.in_cache[0], found):
                    found = found.first(len(found) - 1)  # no room for a copy of the last block
                    needed = blocks_to_find(state, group, found)
                if needed + spare > available:
                    note_wait(self.state, "blocks", needed)
                    return
                self._begin(draft, group, found, now)
            available -= needed
        note_wait(self.state, "budget")

    def _begin(self, draft: StepDraft, group: SequenceGroup, found: Found, now: float) -> None:
        """Start a waiting group with blocks that were found for it."""
        lifecycle.start(self.state, group, draft)
        first = group.in_cache[0]
        attach(self.state, first, found)
        if found.num_to_bring:
            draft.loaded.append((first, len(found)))
            draft.await_blocks(group)
        if group.queue_seconds is None:
            group.queue_seconds = now - group.request.arrival
            group.cached_tokens = min(int(self.rows.context[first.row]), group.num_prompt - 1)
            block_size = self.blocks.block_size
            on_device = found.num_tokens(block_size) - found.num_from_host * block_size
            group.cached_host_tokens = max(0, group.cached_tokens - on_device)
            note_admission(self.state, group, found)
        if found.num_to_bring:
            group.timeline.enter("loading", self.state.clock())
        group.prefill_queue = list(group.in_cache) if group.forked else group.live[:1]
        self._schedule_prefill(draft, group)

    def _swap_in(self, draft: StepDraft, group: SequenceGroup) -> None:
        """Bring a waiting group back from host memory."""
        lifecycle.start(self.state, group, draft)
        selecting = group.beams is not None and group.beams.pending
        for sequence in group.live:
            if sequence.host_blocks and sequence not in group.prefill_queue and not selecting:
                assert sequence.num_tokens == sequence.saved_context + 1
                self.rows.override([sequence.row], sequence.tokens[-1:])
        lifecycle.swap_in(self.state, group)
        for sequence in group.live:
            draft.loaded.append((sequence, int(self.rows.context[sequence.row]) // self.blocks.block_size))
            lifecycle.expect_write(self.state, sequence)
        draft.await_blocks(group)
