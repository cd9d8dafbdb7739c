"""The scheduler's state: requests that wait and run, their rows and blocks, and the steps in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from weakref import WeakSet

import numpy as np

from quire.engine.capacity import Capacity
from quire.engine.hashing import BlockHasher
from quire.engine.memory.manager import BlockManager
from quire.engine.records import Company, RequestRecord
from quire.engine.schedule.draft import InFlightStep, Transfers
from quire.engine.schedule.plan import NOT_FINITE
from quire.engine.schedule.queue_waits import QueueWaits
from quire.engine.sequences.pending_masks import PendingMasks
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import Sequence, SequenceGroup


class SchedulerState:
    """Groups in the order of their arrival: those that run first, then those that wait."""

    def __init__(
        self,
        capacity: Capacity,
        eos_token_ids: tuple[int, ...],
        hasher: BlockHasher | None,
        num_host_blocks: int,
    ) -> None:
        longest = capacity.max_model_len
        if capacity.keeps_all:
            longest = min(longest, capacity.num_blocks * capacity.block_size + 1)
        self.capacity = capacity  # of requests
        self.eos_token_ids = tuple(token for token in eos_token_ids if token < capacity.vocab_size)
        self.rows = Rows(capacity.max_num_seqs, longest, capacity.block_size)
        self.blocks = BlockManager(
            capacity.num_blocks,
            capacity.block_size,
            self.rows,
            hasher,
            num_host_blocks,
            capacity.windows,
            keeps_all=capacity.keeps_all,
        )
        self.groups: dict[int, SequenceGroup] = {}  # by request id
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self.in_flight: deque[InFlightStep] = deque()  # not committed, oldest first
        self.transfers: deque[Transfers] = deque()  # of committed steps, oldest first
        self.shared_tails: dict[int, Sequence] = {}  # by row: forked, and to write into a shared block next
        self.ending_at = np.zeros(capacity.vocab_size + 1, np.int32)  # how many groups end at each token
        self.ending_at[NOT_FINITE] = 1  # all do
        self.pending_masks = PendingMasks()
        self.num_in_lockstep = 0  # groups that wait for the commit of each of their steps
        self.num_swapped = 0  # groups that wait in host memory
        self.in_turn = True  # older groups run before newer ones
        self.num_arrivals = 0
        self.clock: Callable[[], float] = time.monotonic
        self.queue_waits = QueueWaits()
        self.stalled: set[SequenceGroup] = set()  # running, and waiting for blocks in transfer
        self.steps = Company()  # all that were planned
        self.records: list[RequestRecord] = []  # of requests that have ended and were not told of
        self.alive: WeakSet[SequenceGroup] = WeakSet()  # those that have ended too, until they are let go

    def take_records(self) -> list[RequestRecord]:
        """Return those of the requests that have ended since the last time."""
        records, self.records = self.records, []
        return records

    @property
    def behind_window_blocks(self) -> int:
        """Return how many blocks window groups do not hold of sequences in rows."""
        if self.blocks.windows is None:
            return 0
        return int(self.rows.given_back.sum()) // self.blocks.block_size

    @property
    def tokens_filled(self) -> int:
        """Return how many token slots are in use in distinct active blocks."""
        pool, block_size = self.blocks.pool, self.blocks.block_size
        total = int(self.rows.context.sum())
        if self.blocks.windows is not None:
            total = total * self.blocks.pages - int(self.rows.given_back.sum())
        # Every reference beyond a block's first counts its tokens again: shared blocks are full, but for
        # the tails of groups that have forked and not written since.
        twice = (pool.references - pool.num_active) * block_size
        tails: dict[int, int] = {}
        for row, sequence in self.shared_tails.items():
            logical, filled = divmod(int(self.rows.context[row]), block_size)
            for table in sequence.tables:
                tails[table.block(logical)] = filled
        for block, filled in tails.items():
            twice -= (pool.count(block) - 1) * (block_size - filled)
        return total - twice
