"""The moves of blocks while somebody watches: from the plan of each step, and from the prefix cache."""

from __future__ import annotations

import time
from collections import Counter, deque

from quire.engine.core import EngineCore
from quire.engine.hashing import Digest, Prefix
from quire.engine.inspection.messages import Move, MoveKind
from quire.engine.schedule.plan import StepPlan

MAX_MOVES = 20_000  # between two questions


class Recorder:
    """Notes what plans and the cache do. It is there only while it is asked for what it has noted."""

    def __init__(self, core: EngineCore) -> None:
        self.hits: Counter[Digest] = Counter()  # of cached blocks that tables have named since
        self.evictions: Counter[Digest] = Counter()  # by the block before the evicted one
        self.num_evictions = 0
        self._core = core
        self._cache = core.scheduler.blocks.cache
        self._moves: deque[Move] = deque(maxlen=MAX_MOVES)
        self._noted = 0
        self._step = 0
        self._plan: StepPlan | None = core.plan  # whose moves are noted
        published = self._cache.prefixes()
        self._blocks = {prefix.digest: self._cache.find(prefix) for prefix in published}
        self._cache.listeners.append(self._hear)

    def close(self) -> None:
        self._cache.listeners.remove(self._hear)

    def take(self) -> tuple[list[Move], int]:
        """Return the moves since the last time, and how many were too many to be kept."""
        moves, lost = list(self._moves), self._noted - len(self._moves)
        self._moves.clear()
        self._noted = 0
        return moves, lost

    def observe(self) -> None:
        """Note the moves of the step just made."""
        self._step += 1
        plan = self._core.plan
        if plan is None or plan is self._plan:
            return
        self._plan = plan
        for source, destination in plan.copies.tolist():
            self._note("copy", destination, source, self._owner(destination))
        for device, host in plan.swap_out.tolist():
            self._note("swap_out", device, host)
        for host, device in plan.swap_in.tolist():
            self._note("swap_in", device, host)
        moved = {*plan.copies[:, 1].tolist(), *plan.swap_in[:, 1].tolist()}
        rows, blocks = self._core.scheduler.state.rows, self._core.scheduler.blocks
        sequences, pool = rows.sequences, blocks.pool
        entries = zip(plan.table_rows.tolist(), plan.table_blocks.tolist(), strict=True)
        for table_row, block in entries:
            sequence = sequences[table_row % rows.stride]
            if block in moved or sequence is None:  # it has left meanwhile
                continue
            kind: MoveKind = "allocate"
            if block in self._cache and block not in self._cache.computing:
                kind = "hit"
                self.hits[self._cache.prefix(block).digest] += 1
            elif table_row >= rows.stride and pool.is_kept(block):  # a window group's, which has no texts
                kind = "hit"
            elif pool.count(block) > 1:
                kind = "fork"
            self._note(kind, block, -1, sequence.group.request.id)

    def _owner(self, block: int) -> int:
        """Return the request that runs and whose table names `block`, or -1."""
        for group in self._core.scheduler.state.running:
            if any(block in sequence.blocks for sequence in group.live):
                return group.request.id
        return -1

    def _hear(self, prefix: Prefix, is_published: bool) -> None:
        if is_published:
            block = self._blocks[prefix.digest] = self._cache.find(prefix)
            if block is not None:
                self._note("publish", block)
        elif (block := self._blocks.pop(prefix.digest, None)) is not None:
            self.num_evictions += 1
            self.hits.pop(prefix.digest, None)
            self.evictions.pop(prefix.digest, None)
            if prefix.before is not None:
                self.evictions[prefix.before.digest] += 1
            self._note("evict", block)

    def _note(self, kind: MoveKind, block: int, other: int = -1, request: int = -1) -> None:
        self._noted += 1
        self._moves.append(Move(self._step, time.time(), kind, block, other, request))
