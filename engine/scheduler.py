"""Continuous batching: which tokens of which sequences the next step computes.

First come, first served, at the granularity of one step (PagedAttention, sections 4.4 and 4.5). Running
decodes come first, then prefill chunks of running groups, then waiting groups, under one token budget.
Deterministic: the same calls in the same order give the same plans.
"""

from __future__ import annotations

import logging
from collections import deque

import numpy as np

from engine.admission import Capacity
from engine.beam_group import BeamGroup
from engine.block_manager import BlockManager, Found
from engine.block_pool import OutOfBlocks
from engine.outputs import collect_prompt_logprobs, sampled_logprobs
from engine.plan import Int32, StepPlan, StepResult
from engine.preemption import PreemptionPolicy
from engine.prefix_cache import BlockHasher
from engine.request import FinishReason, Output, Request, TokenLogprob
from engine.rows import Rows
from engine.sequence import NO_ROW, Sequence, SequenceGroup
from engine.step import Flight, Prefill, StepDraft

logger = logging.getLogger("quire.scheduler")

WATERMARK = 0.01  # share of the blocks that admission leaves to those already running
MAX_SPILLS = 64  # cached blocks a step looks at to copy to host memory before they are evicted


class Scheduler:
    """Owns the queues and, through the block manager, all block tables."""

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
        self.rows = Rows(capacity.max_num_seqs)
        self.blocks = BlockManager(
            capacity.num_blocks, capacity.block_size, self.rows, hasher, num_host_blocks
        )
        self.policy = policy or PreemptionPolicy()
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[SequenceGroup] = deque()  # by arrival; all arrived after those running
        self.running: list[SequenceGroup] = []  # by arrival
        self.flights: deque[Flight] = deque()  # handed out and not committed, oldest first
        self.recomputes = 0  # groups that yielded and lost their blocks, since start
        self.swaps = 0  # groups that yielded and went to host memory, since start
        self.blocks_swapped_out = 0  # since start, spilled ones included
        self.blocks_swapped_in = 0
        self._capacity = capacity
        self._groups: dict[int, SequenceGroup] = {}
        self._beam_groups = 0  # of those, with beams
        self._given: dict[int, int] = {}  # by row: the token it decodes on from, to be told to the device
        self._arrivals = 0
        steps_ahead = max_num_batched_tokens // capacity.block_size + capacity.max_num_seqs
        self._spill_reserve = min(capacity.num_blocks // 2, steps_ahead)
        self._watermark = int(capacity.num_blocks * WATERMARK)
        self._decode_rows: Int32 | None = None  # rows past prefill, oldest group first; None: stale
        self._shared_tails: dict[int, Sequence] = {}  # by row: forked, and to write into a shared block next

    # -- requests -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when it could never run, with the numbers."""
        self._capacity.check(request)
        assert request.id not in self._groups, f"request id {request.id} is already in use"
        group = SequenceGroup(request, self._arrivals, self.eos_token_ids)
        if request.params.beam_width:
            group.beams = BeamGroup(group, self._capacity.vocab_size)
        self._arrivals += 1
        self._beam_groups += group.beams is not None
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
        if draft.preempted:
            draft.forget_preempted()
            decodes = decodes[self.rows.decoding[decodes]]
        elif not draft.stalled:
            self._admit(draft, now)
        if self.blocks.pool.num_free < self._spill_reserve:
            self.blocks.spill(min(MAX_SPILLS, self._spill_reserve - self.blocks.pool.num_free))
        if not len(decodes) and not draft.prefills and not self.blocks.moves.has_transfers:
            return None
        self.rows.context[decodes] += 1
        for prefill in draft.prefills:
            for sequence in prefill.samples:
                self._may_decode(sequence, sequence.group.beams is None)
        self.blocks_swapped_out += len(self.blocks.moves.swap_out) + len(self.blocks.moves.spills)
        self.blocks_swapped_in += len(self.blocks.moves.swap_in)
        given = {row: token for row, token in self._given.items() if self.rows.decoding[row]}
        self._given = {row: token for row, token in self._given.items() if row not in given}
        moves = self.blocks.take_moves()
        plan, flight = draft.build(self.rows, decodes, moves, given, self.blocks.block_size)
        self.flights.append(flight)
        if self._beam_groups:
            for sequence in flight.samples:
                if sequence.group.beams is not None:  # until the selection nobody knows how it goes on
                    sequence.group.beams.pending = True
                    self._may_decode(sequence, False)
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
            # Not while its blocks are on their way, and not once it was preempted for an older one.
            if self.rows.decoding[row] and self.rows.context[row] < self.rows.limit[row]:
                self._own(draft, sequence, int(self.rows.context[row]))
        rows = rows[self.rows.decoding[rows]]
        if draft.stalled and self._beam_groups:
            for row in list(draft.stalled):
                stalled = self.rows.sequences[row]
                if stalled is not None and stalled.group.beams is not None:  # all beams or none
                    draft.stalled |= {beam.row for beam in stalled.group.beams.order}
        if draft.stalled:
            rows = rows[~np.isin(rows, list(draft.stalled))]
        return rows

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
        while group.prefill_queue and draft.budget and not group.transferring:
            sequence = group.prefill_queue[0]
            row = sequence.row
            if not sequence.table:
                self._find_start(sequence)
            # Were all tokens found, the last one is computed all the same, for its logits.
            start = min(int(self.rows.context[row]), len(sequence.tokens) - 1)
            end = min(len(sequence.tokens), start + draft.budget)
            if start < self.rows.capacity[row] and not self._own(draft, sequence, start):
                return
            if not self._back(draft, sequence, end):
                end = int(self.rows.capacity[row]) if sequence.row == row else start
                if end <= start:
                    return
            self.rows.context[row] = end
            draft.budget -= end - start
            done = end == len(sequence.tokens)
            if done:
                group.prefill_queue.pop(0)
            samples = self._fork(sequence) if done else []
            draft.prefills.append(Prefill(sequence, start, end, samples, row))
            if not done:
                return

    def _admit(self, draft: StepDraft, now: float) -> None:
        """Let waiting groups in, strictly in order: those that were preempted come before all new ones."""
        available = self.blocks.pool.num_available
        available -= sum(self._blocks_to_come(group) for group in self.running)
        while self.waiting and draft.budget and not self.waiting[0].transferring:
            group = self.waiting[0]
            if len(group.live) > self.rows.num_free:
                return
            spare = self._watermark if self.running else 0
            if group.swapped:
                away = {block for sequence in group.live for block in sequence.host_table}
                needed = max(self._blocks_to_resume(group), len(away))
                # A group that comes back and must yield again has moved its blocks for nothing: leave a
                # block for each sequence that runs.
                spare = max(spare, self.rows.size - self.rows.num_free) if self.running else 0
                if needed + spare > available:
                    return
                self._swap_in(draft, group)
            else:
                found = self._find(group.in_cache[0])
                needed = self._blocks_to_find(group, found)
                if needed + spare > available and self._is_whole(group, found):
                    found = found.first(len(found) - 1)  # no room for a copy of the last block
                    needed = self._blocks_to_find(group, found)
                if needed + spare > available:
                    return
                self._begin_group(draft, group, found, now)
            available -= needed

    def _begin_group(self, draft: StepDraft, group: SequenceGroup, found: Found, now: float) -> None:
        self.running.append(self.waiting.popleft())
        live = group.live
        for sequence in live:
            self.rows.assign(sequence)
            draft.start(sequence)
        self._begin(draft, group.in_cache[0], found)
        if group.queue_seconds is None:
            group.queue_seconds = now - group.request.arrival
            group.cached_tokens = min(int(self.rows.context[group.in_cache[0].row]), group.num_prompt - 1)
            on_device = len(found.device) * self.blocks.block_size
            group.cached_host_tokens = max(0, group.cached_tokens - on_device)
        group.prefill_queue = list(group.in_cache) if group.forked else live[:1]
        self._schedule_prefill(draft, group)

    def _swap_in(self, draft: StepDraft, group: SequenceGroup) -> None:
        self.running.append(self.waiting.popleft())
        for sequence in group.live:
            self.rows.assign(sequence)
            draft.start(sequence)
            if sequence.host_table and sequence not in group.prefill_queue:
                assert len(sequence.tokens) == sequence.saved_context + 1
                self._given[sequence.row] = sequence.tokens[-1]
        self.blocks.swap_in(group)
        for sequence in group.live:
            context = int(self.rows.context[sequence.row])
            draft.brought.append((sequence, context // self.blocks.block_size))
            if context % self.blocks.block_size and not self.blocks.is_writable(sequence, context):
                self._shared_tails[sequence.row] = sequence
        group.swapped = False
        self._transfer(draft, group)

    def _transfer(self, draft: StepDraft, group: SequenceGroup) -> None:
        """Leave `group` alone until this step is committed: its blocks are on their way."""
        group.transferring = True
        draft.arrivals.append(group)

    # -- blocks -------------------------------------------------------------------------------------

    def _blocks_to_resume(self, group: SequenceGroup) -> int:
        """Blocks that a waiting group names until each of its sequences has taken a decode step."""
        shared = group.num_prompt // self.blocks.block_size
        most = group.num_prompt + group.request.params.max_tokens - 1
        return shared + sum(
            self.blocks.blocks_for(min(len(sequence.tokens) + 1, most)) - shared for sequence in group.live
        )

    def _is_whole(self, group: SequenceGroup, found: Found) -> bool:
        return len(found) * self.blocks.block_size == len(group.in_cache[0].tokens)

    def _blocks_to_find(self, group: SequenceGroup, found: Found) -> int:
        """Of `_blocks_to_resume`, how many must come from those available when `found` are shared.

        One more when the tokens are found whole: the last one is computed in a copy of its block.
        """
        in_use = sum(self.blocks.pool.count(block) > 0 for block in found.device)
        return self._blocks_to_resume(group) - in_use + self._is_whole(group, found)

    def _blocks_to_come(self, group: SequenceGroup) -> int:
        """Blocks that a running group was admitted with and has not taken yet."""
        if not group.prefill_queue:
            return 0
        held = {block for sequence in group.live for block in sequence.table}
        return max(0, self._blocks_to_resume(group) - len(held))

    def _begin(self, draft: StepDraft, sequence: Sequence, found: Found) -> None:
        """Start the table of `sequence` with found blocks."""
        self.blocks.attach(sequence, found)
        self.rows.context[sequence.row] = len(found) * self.blocks.block_size
        if found.host:
            draft.brought.append((sequence, len(found)))
            self._transfer(draft, sequence.group)

    def _find(self, sequence: Sequence) -> Found:
        """Blocks that need not be computed: those findable, up to where prompt logprobs are still wanted."""
        group = sequence.group
        found = self.blocks.match(sequence)
        if group.prompt_logprobs is not None and group.prompt_logprobs_asked < group.num_prompt:
            return found.first((group.prompt_logprobs_asked - 1) // self.blocks.block_size)
        return found

    def _find_start(self, sequence: Sequence) -> None:
        """Resuming a later sequence of a group: it shares the first one's prompt, and may find more."""
        first = sequence.group.in_cache[0]
        most = (len(sequence.tokens) - 1) // self.blocks.block_size
        found = Found(self._find(sequence).device[:most], [])
        shared = min(sequence.group.num_prompt // self.blocks.block_size, most)
        if first is not sequence and shared > len(found):
            self.blocks.fork(first, sequence, shared)
            self.rows.context[sequence.row] = shared * self.blocks.block_size
        else:
            self.blocks.attach(sequence, found)
            self.rows.context[sequence.row] = len(found) * self.blocks.block_size

    def _back(self, draft: StepDraft, sequence: Sequence, num_tokens: int) -> bool:
        """Back `num_tokens` of `sequence` with blocks; False when it cannot go on in this step."""
        while True:
            try:
                self.blocks.grow(sequence, num_tokens)
                return True
            except OutOfBlocks:
                missing = self.blocks.blocks_for(num_tokens) - len(sequence.table)
                if not self._make_room(draft, sequence, missing):
                    return False

    def _own(self, draft: StepDraft, sequence: Sequence, position: int) -> bool:
        """Make the block of `position` writable; False when `sequence` cannot go on in this step."""
        while not self.blocks.is_writable(sequence, position):
            try:
                self.blocks.copy_on_write(sequence, position)
            except OutOfBlocks:
                if not self._make_room(draft, sequence, 1):
                    return False
        self._shared_tails.pop(sequence.row, None)
        return True

    def _make_room(self, draft: StepDraft, sequence: Sequence, missing: int) -> bool:
        """Have newer groups yield; True when it is worth trying again in this very step."""
        if self.blocks.pool.num_in_transfer - draft.promised < missing:
            newest = self.running[-1]
            # The oldest never yields: alone, it has room once what is in transfer has arrived.
            alone = newest is self.running[0] and self.blocks.pool.num_in_transfer > 0
            if not newest.transferring and not alone:
                self._preempt_newest(draft, sequence)
                if newest is sequence.group:
                    return False
                if not newest.swapped or self.blocks.pool.num_available:
                    return True
                return self._make_room(draft, sequence, missing)
        draft.promised += missing
        draft.stalled.add(sequence.row)
        return False

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """`sequence` is in the cache as a whole: which sequences sample from its last logits."""
        group = sequence.group
        if group.forked or group.beams is not None:
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

    def _preempt_newest(self, draft: StepDraft, beneficiary: Sequence) -> None:
        """The newest running group yields its blocks, keeps its tokens and comes back before any other."""
        group = self.running.pop()
        rows = {sequence.row for sequence in group.live}
        blocks = len({block for sequence in group.live for block in sequence.table})
        tokens = int(self.rows.context[list(rows)].sum())
        # What this very step was to do to its blocks has not happened yet, and will not.
        touched = any(copy[0] in rows for copy in self.blocks.moves.copies)
        touched = touched or any(prefill.row in rows for prefill in draft.prefills)
        touched = touched or (group.beams is not None and group.beams.pending)  # its tables are to change
        draft.preempted |= rows
        swap = not touched and self.policy.swaps(blocks, tokens) and self.blocks.swap_out(group)
        for sequence in group.live:
            self._release(sequence)
        if swap:
            self.swaps += 1
            group.swapped = True
            self._transfer(draft, group)
        else:
            self.recomputes += 1
            group.prefill_queue = []
        self.waiting.appendleft(group)
        logger.debug(
            "preempted request=%d for=%d mode=%s blocks=%d tokens=%d",
            group.request.id,
            beneficiary.group.request.id,
            "swap" if swap else "recompute",
            blocks,
            tokens,
        )

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence)
        self._shared_tails.pop(sequence.row, None)
        self._given.pop(sequence.row, None)
        self.rows.release(sequence)
        self._decode_rows = None

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence, running or waiting; its group ends with its last sequence."""
        assert sequence.finish_reason is None
        sequence.finish_reason = reason
        group = sequence.group
        if sequence.row != NO_ROW:
            self._release(sequence)
        self.blocks.drop_host(sequence)
        if sequence in group.prefill_queue:
            group.prefill_queue.remove(sequence)
        if not group.live:
            del self._groups[group.request.id]
            self._beam_groups -= group.beams is not None
            if group in self.waiting:
                self.waiting.remove(group)
            else:
                self.running.remove(group)

    def commit(self, result: StepResult) -> list[Output]:
        """Book what the oldest handed-out step gave; what it brings for ended sequences is dropped."""
        flight = self.flights.popleft()
        self.blocks.arrived(flight.moves)
        for sequence, num_blocks in flight.filled:
            if sequence.row != NO_ROW:  # else its blocks are gone
                self.blocks.publish(sequence, num_blocks)
        for group in flight.arrivals:
            self._arrive(group)
        for wanted, got in zip(flight.prompt_logprobs, result.prompt_logprobs, strict=True):
            collect_prompt_logprobs(wanted, got)
        logprobs = sampled_logprobs(flight.samples, result)
        outputs = []
        for i, (sequence, token) in enumerate(zip(flight.samples, result.tokens.tolist(), strict=True)):
            if sequence.finish_reason is not None:
                continue
            if sequence.group.beams is None:
                outputs.append(self._append(sequence, token, logprobs.get(i)))
            elif result.logprobs is not None:
                at = int(np.searchsorted(result.logprob_samples, i))
                if sequence.group.beams.collect(sequence, result.logprobs, at):
                    outputs += self._select(sequence.group, sequence.group.beams)
        return outputs

    def _select(self, group: SequenceGroup, beams: BeamGroup) -> list[Output]:
        """All beams of `group` have their candidates: choose those that go on, or end the search."""
        try:
            step = beams.advance()
        except FloatingPointError as error:
            outputs = [beams.ending(i, "error", str(error)) for i in range(group.request.params.n)]
            return self._end_beams(group, outputs, "error")
        if beams.search.done:
            return self._end_beams(group, beams.outputs(), "stop")
        beams.reparent(step, self.blocks, self.rows)
        group.forked = True
        for sequence in group.sequences:
            row = sequence.row
            if row == NO_ROW:
                continue
            self._may_decode(sequence, sequence in beams.order)
            self._shared_tails.pop(row, None)
            if sequence in beams.order:
                self._given[row] = sequence.tokens[-1]
                context = int(self.rows.context[row])
                if context % self.blocks.block_size and not self.blocks.is_writable(sequence, context):
                    self._shared_tails[row] = sequence
        return []

    def _end_beams(self, group: SequenceGroup, outputs: list[Output], reason: FinishReason) -> list[Output]:
        self._describe_first(group, outputs[0])
        for sequence in group.live:
            self.finish(sequence, reason)
        return outputs

    def _may_decode(self, sequence: Sequence, may: bool) -> None:
        self.rows.decoding[sequence.row] = may
        self._decode_rows = None

    def _arrive(self, group: SequenceGroup) -> None:
        """The blocks of `group` are where they were sent."""
        group.transferring = False
        if group.swapped:
            self.blocks.publish_on_host(group)
            return
        for sequence in group.live:
            if sequence.table and sequence not in group.prefill_queue:
                self.rows.decoding[sequence.row] = True
        self._decode_rows = None

    def _append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> Output:
        group = sequence.group
        output = Output(group.request.id, sequence.index, [token])
        self._describe_first(group, output)
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

    def _describe_first(self, group: SequenceGroup, output: Output) -> None:
        """A request's first output says how its prompt was served."""
        if not group.first_output_due:
            return
        group.first_output_due = False
        output.prompt_logprobs = group.prompt_logprobs
        output.queue_seconds = group.queue_seconds
        output.cached_tokens = group.cached_tokens
        output.cached_host_tokens = group.cached_host_tokens

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
        self.blocks.check(live, [flight.moves for flight in self.flights])
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
            # Beams step together: one that got its block may have to wait for the others'.
            allowed = self.blocks.blocks_for(max(context, 1)) + (sequence.group.beams is not None)
            assert len(sequence.table) <= allowed, "a block too many"
        for group in self.waiting:
            assert all(not sequence.table and sequence.row == NO_ROW for sequence in group.live)
            assert group.swapped or not any(sequence.host_table for sequence in group.live)
