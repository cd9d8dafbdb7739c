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
from engine.prefix_cache import BlockHasher
from engine.request import FinishReason, Output, Request, TokenLogprob
from engine.rows import Rows
from engine.sequence import NO_ROW, Sequence, SequenceGroup
from engine.step import Flight, Prefill, StepDraft

WATERMARK = 0.01  # share of the blocks that admission leaves to those already running


class Scheduler:
    """Owns the queues and, through the block manager, all block tables."""

    def __init__(
        self,
        capacity: Capacity,
        max_num_batched_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        *,
        hasher: BlockHasher | None = None,
    ) -> None:
        """Without a hasher nothing is found again: there is no prefix cache."""
        self.rows = Rows(capacity.max_num_seqs)
        self.blocks = BlockManager(capacity.num_blocks, capacity.block_size, self.rows, hasher)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[SequenceGroup] = deque()  # by arrival; all arrived after those running
        self.running: list[SequenceGroup] = []  # by arrival
        self.flights: deque[Flight] = deque()  # handed out and not committed, oldest first
        self.preemptions = 0  # groups that yielded, since start
        self._capacity = capacity
        self._groups: dict[int, SequenceGroup] = {}
        self._arrivals = 0
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
        plan, flight = draft.build(self.rows, decodes, self.blocks.take_moves(), self.blocks.block_size)
        self.flights.append(flight)
        return plan

    def _schedule_decodes(self, draft: StepDraft) -> Int32:
        rows = self._rows_past_prefill()
        rows = rows[self.rows.context[rows] < self.rows.limit[rows]]
        full = self.rows.context[rows] == self.rows.capacity[rows]
        for row in rows[full].tolist():
            sequence = self.rows.sequences[row]
            if sequence is not None:  # else it was preempted for an older one just now
                self._back(draft, sequence, int(self.rows.context[row]) + 1)
        for row, sequence in sorted(self._shared_tails.items(), key=lambda item: item[1].group.order):
            if sequence.row == row and self.rows.context[row] < self.rows.limit[row]:
                self._own(draft, sequence, int(self.rows.context[row]))
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
            if not sequence.table:
                self._find_start(sequence)
            start = int(self.rows.context[row])
            end = min(len(sequence.tokens), start + draft.budget)
            if start % self.blocks.block_size and not self._own(draft, sequence, start):
                return
            if not self._back(draft, sequence, end):
                return
            self.rows.context[row] = end
            draft.budget -= end - start
            done = end == len(sequence.tokens)
            if done:
                group.prefill_queue.pop(0)
            samples = self._fork(sequence) if done else []
            draft.prefills.append(Prefill(sequence, start, end, samples, row))

    def _admit(self, draft: StepDraft, now: float) -> None:
        available = self.blocks.pool.num_available - sum(
            self._blocks_to_come(group) for group in self.running
        )
        while self.waiting and draft.budget:
            group = self.waiting[0]
            live = group.live
            spare = self._watermark if self.running else 0
            found = self._find(live[0])
            needed = self._blocks_to_find(group, found)
            if needed + spare > available and len(found) * self.blocks.block_size == len(live[0].tokens):
                found.pop()  # there may be room for the last block, but not for a copy of it
                needed = self._blocks_to_find(group, found)
            if len(live) > self.rows.num_free or needed + spare > available:
                return
            available -= needed
            self.waiting.popleft()
            self.running.append(group)
            for sequence in live:
                self.rows.assign(sequence)
                draft.start(sequence)
            self._begin(live[0], found)
            if group.queue_seconds is None:
                group.queue_seconds = now - group.request.arrival
                group.cached_tokens = int(self.rows.context[live[0].row])
            group.prefill_queue = live if group.forked else live[:1]
            self._schedule_prefill(draft, group)

    # -- blocks -------------------------------------------------------------------------------------

    def _blocks_to_resume(self, group: SequenceGroup) -> int:
        """Blocks that a waiting group names until each of its sequences has taken a decode step."""
        shared = group.num_prompt // self.blocks.block_size
        most = group.num_prompt + group.request.params.max_tokens - 1
        return shared + sum(
            self.blocks.blocks_for(min(len(sequence.tokens) + 1, most)) - shared for sequence in group.live
        )

    def _blocks_to_find(self, group: SequenceGroup, found: list[int]) -> int:
        """Of `_blocks_to_resume`, how many must come from those available when `found` are shared.

        One more when the tokens are found whole: the last one is computed in a copy of its block.
        """
        in_use = sum(self.blocks.pool.count(block) > 0 for block in found)
        whole = len(found) * self.blocks.block_size == len(group.live[0].tokens)
        return self._blocks_to_resume(group) - in_use + whole

    def _blocks_to_come(self, group: SequenceGroup) -> int:
        """Blocks that a running group was admitted with and has not taken yet."""
        if not group.prefill_queue:
            return 0
        held = {block for sequence in group.live for block in sequence.table}
        return max(0, self._blocks_to_resume(group) - len(held))

    def _begin(self, sequence: Sequence, found: list[int]) -> None:
        """Start the table of `sequence` with found blocks; at least its last token is to be computed."""
        self.blocks.attach(sequence, found)
        known = min(len(found) * self.blocks.block_size, len(sequence.tokens) - 1)
        self.rows.context[sequence.row] = known

    def _find(self, sequence: Sequence) -> list[int]:
        """Blocks that need not be computed: those findable, up to where prompt logprobs are still wanted."""
        group = sequence.group
        found = self.blocks.match(sequence)
        if group.prompt_logprobs is not None and group.prompt_logprobs_asked < group.num_prompt:
            return found[: (group.prompt_logprobs_asked - 1) // self.blocks.block_size]
        return found

    def _find_start(self, sequence: Sequence) -> None:
        """Resuming a later sequence of a group: it shares the first one's prompt, and may find more."""
        first = sequence.group.live[0]
        most = (len(sequence.tokens) - 1) // self.blocks.block_size
        found = self._find(sequence)[:most]
        shared = min(sequence.group.num_prompt // self.blocks.block_size, most)
        if first is not sequence and shared > len(found):
            self.blocks.fork(first, sequence, shared)
            self.rows.context[sequence.row] = shared * self.blocks.block_size
        else:
            self._begin(sequence, found)

    def _back(self, draft: StepDraft, sequence: Sequence, num_tokens: int) -> bool:
        """Back `num_tokens` of `sequence` with blocks; False when its own group had to yield for it."""
        while True:
            try:
                self.blocks.grow(sequence, num_tokens)
                return True
            except OutOfBlocks:
                if self._preempt_newest(draft) is sequence.group:
                    return False

    def _own(self, draft: StepDraft, sequence: Sequence, position: int) -> bool:
        """Make the block of `position` writable; False when its own group had to yield for it."""
        while not self.blocks.is_writable(sequence, position):
            try:
                self.blocks.copy_on_write(sequence, position)
            except OutOfBlocks:
                if self._preempt_newest(draft) is sequence.group:
                    return False
        self._shared_tails.pop(sequence.row, None)
        return True

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """`sequence` is in the cache as a whole: which sequences sample from its last logits."""
        group = sequence.group
        if group.forked:
            return [sequence]
        group.forked = True
        live = group.live
        partial = len(sequence.tokens) % self.blocks.block_size != 0
        for other in live:
            if other is not sequence:
                self.blocks.fork(sequence, other)
                self.rows.context[other.row] = self.rows.context[sequence.row]
            if partial and len(live) > 1:
                self._shared_tails[other.row] = other
        return live

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
        self.blocks.free(sequence)
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
        for block in flight.held:
            self.blocks.pool.unhold(block)
        for sequence, num_blocks in flight.filled:
            if sequence.row != NO_ROW:  # else its blocks are gone
                self.blocks.publish(sequence, num_blocks)
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
            output.cached_tokens = group.cached_tokens
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
        pool, block_size = self.blocks.pool, self.blocks.block_size
        total = int(self.rows.context.sum())
        # Every reference beyond a block's first counts its tokens again: shared blocks are full, but for
        # the tails of groups that have forked and not written since.
        twice = (pool.references - pool.num_active) * block_size
        tails: dict[int, int] = {}
        for row, sequence in self._shared_tails.items():
            logical, filled = divmod(int(self.rows.context[row]), block_size)
            tails[sequence.table[logical]] = filled
        for block, filled in tails.items():
            twice -= (pool.count(block) - 1) * (block_size - filled)
        return total - twice

    def check(self) -> None:
        """Assert every invariant. O(blocks + tokens)."""
        groups = [*self.running, *self.waiting]
        live = [sequence for group in groups for sequence in group.live]
        held = [block for flight in self.flights for block in flight.held]
        held += [source for _, source, _ in self.blocks.moves.copies]
        self.blocks.check(live, held)
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
