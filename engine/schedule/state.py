"""Which requests wait and which run, and the rows and blocks of those that run."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from weakref import WeakSet

import numpy as np

from quire.engine.capacity import Capacity
from quire.engine.hashing import BlockHasher
from quire.engine.memory.manager import BlockManager
from quire.engine.messages import FinishReason, Request
from quire.engine.schedule.draft import Delivery, Flight, StepDraft
from quire.engine.schedule.plan import NOT_FINITE
from quire.engine.sequences.grammar import Constraint
from quire.engine.sequences.pending_masks import Masking
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import NO_ROW, BeamGroup, Sequence, SequenceGroup


class RunQueue:
    """Groups in the order of their arrival: those that run first, then those that wait.

    A group that yields goes to the front of those that wait, so nobody overtakes it.
    """

    def __init__(
        self,
        capacity: Capacity,
        eos_token_ids: tuple[int, ...],
        hasher: BlockHasher | None,
        num_host_blocks: int,
    ) -> None:
        longest = min(capacity.max_model_len, capacity.num_blocks * capacity.block_size + 1)
        self.rows = Rows(capacity.max_num_seqs, longest, capacity.block_size)
        self.blocks = BlockManager(
            capacity.num_blocks, capacity.block_size, self.rows, hasher, num_host_blocks
        )
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self.flights: deque[Flight] = deque()  # handed out and not committed, oldest first
        self.deliveries: deque[Delivery] = deque()  # of committed steps, oldest first
        self.given: dict[int, int] = {}  # by row: the token it decodes on from, to be told to the device
        self.shared_tails: dict[int, Sequence] = {}  # by row: forked, and to write into a shared block next
        self.ending_at = np.zeros(capacity.vocab_size + 1, np.int32)  # how many groups end at each token
        self.ending_at[NOT_FINITE] = 1  # all do
        self.masking = Masking()
        self.num_in_lockstep = 0  # groups that wait for the commit of each of their steps
        self.num_swapped = 0  # groups that wait in host memory
        self.in_turn = True  # older groups run before newer ones
        self.capacity = capacity  # of requests
        self._eos_token_ids = tuple(token for token in eos_token_ids if token < capacity.vocab_size)
        self._groups: dict[int, SequenceGroup] = {}
        self.alive: WeakSet[SequenceGroup] = WeakSet()  # those that have ended too, until they are let go
        self._arrivals = 0

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        """Queue a request, with its grammar's beginning. Raises ValueError when it could never run."""
        prompt = self.capacity.check(request)
        assert request.id not in self._groups, f"request id {request.id} is already in use"
        group = SequenceGroup(request, prompt, self._arrivals, self._eos_token_ids)
        if request.params.beam_width:
            group.beams = BeamGroup(group, self.capacity.vocab_size)
        if constraint is not None:
            for sequence in group.sequences:
                sequence.constraint = constraint.fork()
        self._arrivals += 1
        self.num_in_lockstep += group.in_lockstep
        for token in group.stop_tokens:
            self.ending_at[token] += 1
        self._groups[request.id] = group
        self.alive.add(group)
        self.waiting.append(group)

    def abort(self, request_id: int) -> None:
        """Forget a request and free its blocks; what is in flight for it is dropped at its commit."""
        group = self._groups.get(request_id)
        if group is not None:
            for sequence in group.live:
                self.finish(sequence, "abort")

    def pin(self, tokens: list[int]) -> None:
        """Never evict the full blocks of `tokens`, which are open to all and cached."""
        for prefix in self.blocks.open_to_all(tokens):
            block = self.blocks.cache.find(prefix)
            assert block is not None, "a prefix is pinned before it was computed"
            self.blocks.pool.pin(block)
        others = self.blocks.pool.num_blocks - self.blocks.pool.num_pinned
        self.capacity = replace(self.capacity, num_blocks=others)

    def start(self, draft: StepDraft) -> SequenceGroup:
        """The first waiting group gets rows."""
        group = self.waiting.popleft()
        self.running.append(group)
        for sequence in group.live:
            self.rows.assign(sequence)
            draft.start(sequence)
        return group

    def leave(self, group: SequenceGroup, *, swapped: bool) -> None:
        """The newest running group gives its rows and device blocks back, and waits before all others."""
        assert self.running.pop() is group
        for sequence in group.live:
            self._release(sequence)
        group.swapped = swapped
        self.num_swapped += swapped
        self.waiting.appendleft(group)

    def bring_back(self, group: SequenceGroup) -> None:
        """The blocks of `group`, which has got rows, come from host memory."""
        self.blocks.swap_in(group)
        group.swapped = False
        self.num_swapped -= 1

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence, running or waiting; its group ends with its last sequence."""
        assert sequence.finish_reason is None
        sequence.finish_reason = reason
        group = sequence.group
        if reason == "error":
            self.blocks.forget(sequence)
        queue = self.waiting if sequence.row == NO_ROW else self.running
        if sequence.row != NO_ROW:
            self._release(sequence)
        self.blocks.end(sequence)
        self.masking.drop(sequence)
        if sequence in group.prefill_queue:
            group.prefill_queue.remove(sequence)
        if not group.live:
            queue.remove(group)
            self._forget(group)

    def _forget(self, group: SequenceGroup) -> None:
        del self._groups[group.request.id]
        self.num_in_lockstep -= group.in_lockstep
        self.num_swapped -= group.swapped
        for token in group.stop_tokens:
            self.ending_at[token] -= 1
        group.end()

    def _release(self, sequence: Sequence) -> None:
        for flight in self.flights:
            flight.watch(sequence)
        self.blocks.free(sequence)
        self.shared_tails.pop(sequence.row, None)
        self.masking.leave(sequence)
        self.given.pop(sequence.row, None)
        self.rows.release(sequence)

    def prefilling(self) -> list[SequenceGroup]:
        """Running groups that are not in the cache as a whole, oldest first."""
        if len(self.rows.decodes()) == self.rows.num_used:
            return []
        return [group for group in self.running if group.prefill_queue]

    def expect_write(self, sequence: Sequence) -> None:
        """If the block that `sequence` writes into next is not its own, it needs a copy first."""
        context = self.rows.context.item(sequence.row)
        if context % self.blocks.block_size and not self.blocks.is_writable(sequence, context):
            self.shared_tails[sequence.row] = sequence

    @property
    def tokens_filled(self) -> int:
        """Token slots in use in distinct active blocks."""
        pool, block_size = self.blocks.pool, self.blocks.block_size
        total = int(self.rows.context.sum())
        # Every reference beyond a block's first counts its tokens again: shared blocks are full, but for
        # the tails of groups that have forked and not written since.
        twice = (pool.references - pool.num_active) * block_size
        tails: dict[int, int] = {}
        for row, sequence in self.shared_tails.items():
            logical, filled = divmod(int(self.rows.context[row]), block_size)
            tails[sequence.table[logical]] = filled
        for block, filled in tails.items():
            twice -= (pool.count(block) - 1) * (block_size - filled)
        return total - twice
