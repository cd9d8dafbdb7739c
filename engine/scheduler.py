"""Continuous batching: which tokens of which sequences the next step computes.

First come, first served, at the granularity of one step (PagedAttention, sections 4.4 and 4.5). Running
decodes come first, then prefill chunks of running groups, then waiting groups, under one token budget.
Deterministic: the same calls in the same order give the same plans.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from engine.admission import Capacity
from engine.block_manager import BlockManager
from engine.block_pool import OutOfBlocks
from engine.outputs import collect_prompt_logprobs, sampled_logprobs
from engine.plan import Int32, StepPlan, StepResult
from engine.request import FinishReason, Output, Request, TokenLogprob
from engine.rows import Rows
from engine.sequence import NO_ROW, Sequence, SequenceGroup
from engine.step import Flight, Prefill, StepDraft

WATERMARK = 0.01  # share of the blocks that admission leaves to those already running


class Scheduler:
    """Owns the queues and, through the block manager, all block tables."""

    def __init__(
        self, capacity: Capacity, max_num_batched_tokens: int, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        self.blocks = BlockManager(capacity.num_blocks, capacity.block_size)
        self.rows = Rows(capacity.max_num_seqs)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[SequenceGroup] = deque()  # by arrival; all arrived after those running
        self.running: list[SequenceGroup] = []  # by arrival
        self.flights: deque[Flight] = deque()  # handed out and not committed, oldest first
        self.preemptions = 0  # groups that yielded, since start
        self._groups: dict[int, SequenceGroup] = {}
        self._arrivals = 0
        self._capacity = capacity
        self._watermark = int(capacity.num_blocks * WATERMARK)
        self._decode_rows: Int32 | None = None  # rows past prefill, oldest group first; None: stale
        self._shared_tails: dict[int, Sequence] = {}  # by row: forked, and to write into a shared block next

    # -- requests -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when it could never run, with the numbers."""
        self._capacity.check(request)
        assert request.id not in self._groups, f"request id {request.id} is already in use"
        group = SequenceGroup(request, self._arrivals, self.eos_token_ids)
        self._arrivals += 1
        self._groups[request.id] = group
        self.waiting.append(group)

    def abort(self, request_id: int) -> None:
        """Forget a request and free its blocks; what is in flight for it is dropped at its commit."""
        group = self._groups.get(request_id)
        if group is not None:
            for sequence in group.live:
                self.finish(sequence, "abort")

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.flights)

    # -- one step -----------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step's plan, or None when nothing can run before a commit. `now`: monotonic seconds."""
        draft = StepDraft()
        decodes = self._schedule_decodes(draft)
        draft.budget = self.max_num_batched_tokens - len(decodes)
        for group in list(self.running):
            self._schedule_prefill(draft, group)
        if not draft.preempted:
            self._admit(draft, now)
        else:
            draft.forget_preempted()
            decodes = decodes[self.rows.decoding[decodes]]
        if not len(decodes) and not draft.prefills:
            return None
        self.rows.context[decodes] += 1
        for prefill in draft.prefills:
            for sequence in prefill.samples:
                self.rows.decoding[sequence.row] = True
                self._decode_rows = None
        plan, flight = draft.build(self.rows, decodes)
        self.flights.append(flight)
        return plan

    def _schedule_decodes(self, draft: StepDraft) -> Int32:
        rows = self._rows_past_prefill()
        rows = rows[self.rows.context[rows] < self.rows.limit[rows]]
        full = self.rows.context[rows] == self.rows.capacity[rows]
        for row in rows[full].tolist():
            sequence = self.rows.sequences[row]
            if sequence is not None:  # else it was preempted for an older one just now
                self._grow(draft, sequence, int(self.rows.context[row]) + 1)
        for row, sequence in sorted(self._shared_tails.items(), key=lambda item: item[1].group.order):
            if sequence.row == row and self.rows.context[row] < self.rows.limit[row]:
                self._unshare_tail(draft, sequence)
        return rows[self.rows.decoding[rows]]

    def _rows_past_prefill(self) -> Int32:
        if self._decode_rows is None:
            self._decode_rows = np.array(
                [
                    sequence.row
                    for group in self.running
                    for sequence in group.live
                    if self.rows.decoding[sequence.row]
                ],
                np.int32,
            )
        return self._decode_rows

    def _schedule_prefill(self, draft: StepDraft, group: SequenceGroup) -> None:
        """Take chunks of what `group` has not computed yet, as far as the budget and the blocks go."""
        while group.prefill_queue and draft.budget:
            sequence = group.prefill_queue[0]
            row = sequence.row
            start = int(self.rows.context[row])
            if not sequence.table:
                start = self._share_prompt(draft, sequence)
            end = min(len(sequence.tokens), start + draft.budget)
            if not self._grow(draft, sequence, end):
                return
            self.rows.context[row] = end
            draft.budget -= end - start
            done = end == len(sequence.tokens)
            if done:
                group.prefill_queue.pop(0)
            samples = self._fork(draft, sequence) if done else []
            draft.prefills.append(Prefill(sequence, start, end, samples, row))

    def _admit(self, draft: StepDraft, now: float) -> None:
        available = self.blocks.pool.num_free - sum(self._blocks_to_come(group) for group in self.running)
        while self.waiting and draft.budget:
            group = self.waiting[0]
            live = group.live
            needed = self._blocks_to_resume(group)
            spare = self._watermark if self.running else 0
            if len(live) > self.rows.num_free or needed + spare > available:
                return
            available -= needed
            self.waiting.popleft()
            self.running.append(group)
            if group.queue_seconds is None:
                group.queue_seconds = now - group.request.arrival
            for sequence in live:
                self.rows.assign(sequence)
                draft.start(sequence)
            group.prefill_queue = live if group.forked else live[:1]
            self._schedule_prefill(draft, group)

    # -- blocks -------------------------------------------------------------------------------------

    def _blocks_to_resume(self, group: SequenceGroup) -> int:
        """Blocks that a waiting group needs until each of its sequences has taken a decode step."""
        shared = group.num_prompt // self.blocks.block_size
        most = group.num_prompt + group.request.params.max_tokens - 1
        return shared + sum(
            self.blocks.blocks_for(min(len(sequence.tokens) + 1, most)) - shared for sequence in group.live
        )

    def _blocks_to_come(self, group: SequenceGroup) -> int:
        """Blocks that a running group was admitted with and has not taken yet."""
        if not group.prefill_queue:
            return 0
        return max(0, self._blocks_to_resume(group) - len(self._distinct_blocks(group)))

    def _distinct_blocks(self, group: SequenceGroup) -> set[int]:
        return {block for sequence in group.live for block in sequence.table}

    def _grow(self, draft: StepDraft, sequence: Sequence, num_tokens: int) -> bool:
        """Back `num_tokens` of `sequence` with blocks; False when its own group had to yield for it."""
        held = len(sequence.table)
        while True:
            try:
                self.blocks.extend(sequence.table, num_tokens)
                break
            except OutOfBlocks:
                if self._preempt_newest(draft) is sequence.group:
                    return False
        self._record_blocks(draft, sequence, held)
        return True

    def _unshare_tail(self, draft: StepDraft, sequence: Sequence) -> None:
        row = sequence.row
        logical = int(self.rows.context[row]) // self.blocks.block_size
        while self.blocks.is_shared(sequence.table, logical):
            try:
                source, destination = self.blocks.copy_on_write(sequence.table, logical)
            except OutOfBlocks:
                if self._preempt_newest(draft) is sequence.group:
                    return
                continue
            draft.copies.append((row, source, destination))
            draft.blocks.append((row, logical, destination))
        del self._shared_tails[row]

    def _share_prompt(self, draft: StepDraft, sequence: Sequence) -> int:
        """Resuming: a later sequence shares the full prompt blocks of the group's first; tokens shared."""
        first = sequence.group.live[0]
        if first is sequence:
            return 0
        shared = min(sequence.group.num_prompt, len(sequence.tokens) - 1) // self.blocks.block_size
        sequence.table = self.blocks.fork(first.table, shared)
        self._record_blocks(draft, sequence, 0)
        return shared * self.blocks.block_size

    def _fork(self, draft: StepDraft, sequence: Sequence) -> list[Sequence]:
        """`sequence` is in the cache as a whole: which sequences sample from its last logits."""
        group = sequence.group
        if group.forked:
            return [sequence]
        group.forked = True
        live = group.live
        partial = len(sequence.tokens) % self.blocks.block_size != 0
        for other in live:
            if other is not sequence:
                other.table = self.blocks.fork(sequence.table)
                self._record_blocks(draft, other, 0)
                self.rows.context[other.row] = self.rows.context[sequence.row]
            if partial and len(live) > 1:
                self._shared_tails[other.row] = other
        return live

    def _record_blocks(self, draft: StepDraft, sequence: Sequence, held: int) -> None:
        for logical in range(held, len(sequence.table)):
            draft.blocks.append((sequence.row, logical, sequence.table[logical]))
        self.rows.capacity[sequence.row] = len(sequence.table) * self.blocks.block_size

    # -- yielding and ending ------------------------------------------------------------------------

    def _preempt_newest(self, draft: StepDraft) -> SequenceGroup:
        """The newest running group yields its blocks; its tokens are kept and prefilled again later."""
        group = self.running.pop()
        for sequence in group.live:
            draft.preempted.add(sequence.row)
            self._release(sequence)
        group.prefill_queue = []
        self.waiting.appendleft(group)
        self.preemptions += 1
        return group

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.table)
        self._shared_tails.pop(sequence.row, None)
        self.rows.release(sequence)
        self._decode_rows = None

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence, running or waiting; its group ends with its last sequence."""
        assert sequence.finish_reason is None
        sequence.finish_reason = reason
        group = sequence.group
        if sequence.row != NO_ROW:
            self._release(sequence)
        if sequence in group.prefill_queue:
            group.prefill_queue.remove(sequence)
        if not group.live:
            del self._groups[group.request.id]
            if group in self.waiting:
                self.waiting.remove(group)
            else:
                self.running.remove(group)

    def commit(self, result: StepResult) -> list[Output]:
        """Book what the oldest handed-out step gave; what it brings for ended sequences is dropped."""
        flight = self.flights.popleft()
        for wanted, got in zip(flight.prompt_logprobs, result.prompt_logprobs, strict=True):
            collect_prompt_logprobs(wanted, got)
        logprobs = sampled_logprobs(flight.samples, result)
        outputs = []
        for i, (sequence, token) in enumerate(zip(flight.samples, result.tokens.tolist(), strict=True)):
            if sequence.finish_reason is None:
                outputs.append(self._append(sequence, token, logprobs.get(i)))
        return outputs

    def _append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> Output:
        group = sequence.group
        output = Output(group.request.id, sequence.index, [token])
        if group.first_output_due:
            group.first_output_due = False
            output.prompt_logprobs = group.prompt_logprobs
            output.queue_seconds = group.queue_seconds
        if token < 0:
            output.tokens = []
            output.finish_reason = "error"
            output.error = "the model gave logits that are not finite"
        else:
            sequence.tokens.append(token)
            if logprob is not None:
                output.logprobs = [logprob]
            if token in group.stop_tokens:
                output.finish_reason = "stop"
                output.stop_token = token
            elif sequence.num_generated >= group.request.params.max_tokens:
                output.finish_reason = "length"
        if output.finish_reason is not None:
            self.finish(sequence, output.finish_reason)
        return output

    # -- what others may know ------------------------------------------------------------------------

    @property
    def tokens_filled(self) -> int:
        """Token slots in use in distinct active blocks."""
        pool = self.blocks.pool
        total = int(self.rows.context.sum())
        # Every reference beyond a block's first counts its tokens again: shared blocks are full, but for
        # the tails of groups that have forked and not written since.
        twice = (pool.references - pool.num_active) * self.blocks.block_size
        tails: dict[int, int] = {}
        for row, sequence in self._shared_tails.items():
            logical, filled = divmod(int(self.rows.context[row]), self.blocks.block_size)
            tails[sequence.table[logical]] = filled
        for block, filled in tails.items():
            twice -= (pool.count(block) - 1) * (self.blocks.block_size - filled)
        return total - twice

    def check(self) -> None:
        """Assert every invariant. O(blocks + tokens)."""
        groups = [*self.running, *self.waiting]
        live = [sequence for group in groups for sequence in group.live]
        self.blocks.check(sequence.table for sequence in live)
        assert sorted(self._groups) == sorted(group.request.id for group in groups)
        orders = [group.order for group in groups]
        assert orders == sorted(orders), "a group runs or waits out of its turn"
        in_rows = [sequence for sequence in self.rows.sequences if sequence is not None]
        assert {id(s) for s in in_rows} == {id(s) for group in self.running for s in group.live}
        assert len(in_rows) + self.rows.num_free == self.rows.size
        for sequence in in_rows:
            row = sequence.row
            assert self.rows.sequences[row] is sequence
            assert self.rows.capacity[row] == len(sequence.table) * self.blocks.block_size
            context = int(self.rows.context[row])
            assert context <= min(self.rows.capacity[row], self.rows.limit[row])
            assert len(sequence.table) <= self.blocks.blocks_for(max(context, 1)), "a block too many"
        for group in self.waiting:
            assert all(not sequence.table and sequence.row == NO_ROW for sequence in group.live)
