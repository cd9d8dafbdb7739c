"""Blocks in host memory: those of swapped groups, and cached ones that device memory had no room for."""

from __future__ import annotations

from collections.abc import Sequence as Listed

from quire.engine.hashing import Prefix
from quire.engine.memory.move_kinds import ALLOCATE, FORK, HIT, HOST, KINDS, RELEASE, SWAP_IN, SWAP_OUT
from quire.engine.memory.move_ring import MoveRing
from quire.engine.memory.moves import Moves, Transfer
from quire.engine.memory.pool import BlockPool
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.sequences.sequence import Sequence, SequenceGroup
from quire.engine.sequences.window_table import WindowTable


class HostTier:
    """The second tier: the same accounting as the device's, and content found by the same digests.

    Sequences have tables in it while they are swapped out (section 4.5). What goes from one tier to the other
    is added to the moves of the next plan, and both its ends are held until it has arrived. A tier without
    blocks takes nothing. As on the device, each cache group has an index of its own, by its number.
    """

    def __init__(
        self, num_blocks: int, device: BlockPool, device_caches: Listed[PrefixCache], ring: MoveRing
    ) -> None:
        self.caches = [
            PrefixCache(num_blocks, ring, HOST + KINDS * group) for group in range(len(device_caches))
        ]
        self.cache = self.caches[0]
        self.pool = BlockPool(num_blocks, self._evicted, ring, HOST)
        self._ring = ring
        self._next_look = 0  # evictions here, since start, at which all copies are looked for once more
        self._device = device
        self._device_caches = device_caches
        self._pairs = list(zip(self.caches, device_caches, strict=True))  # of each group

    def _evicted(self, block: int) -> None:
        """Forget what `block` held; on the device it is to be copied again before it is evicted there."""
        cache, device_cache = next(pair for pair in self._pairs if block in pair[0])
        twin = device_cache.find(cache.prefix(block))
        cache.forget(block)
        if twin is not None:
            self._device.mark_lost(twin)

    def swap_out(self, sequences: Listed[Sequence], moves: Moves) -> bool:
        """Copy the device blocks in the tables of a group, shared ones once; False without room for them."""
        # A copy that the next plan would have made is not going to be: its source is what holds the tokens.
        sources = {destination: source for source, destination in moves.copies.values()}
        named = {sources.get(block, block) for sequence in sequences for block in sequence.blocks}
        if not self.pool.num_blocks or len(named) > self.pool.num_available:
            return False
        placed: dict[int, int] = {}
        for sequence in sequences:
            sequence.host_published = sequence.published
            tables = []
            for group, each in enumerate(sequence.tables):
                table = WindowTable(each.first, [sources.get(block, block) for block in each.blocks])
                tables.append(WindowTable(each.first, self._place_all(group, sequence, table, placed, moves)))
            sequence.host_table = tables.pop(0).blocks if sequence.table else []
            sequence.host_window_tables = tables
            self._note(ALLOCATE, sequence)
        return True

    def _place_all(
        self, group: int, sequence: Sequence, table: WindowTable, placed: dict[int, int], moves: Moves
    ) -> list[int]:
        """Return the host blocks for those of a table of `sequence`; `placed`: those of other tables."""
        for logical, block in enumerate(table.blocks, table.first):
            if block in placed:
                self.pool.share(placed[block])
            else:
                prefix = sequence.prefixes[logical] if logical < sequence.published else None
                placed[block] = self._place(group, block, prefix, moves)
        return [placed[block] for block in table.blocks]

    def _note(self, kind: int, sequence: Sequence) -> None:
        """Note that the host tables of `sequence` begin, or end."""
        for number, each in enumerate(sequence.host_tables):
            self._ring.note(kind + HOST + KINDS * number, sequence, each.first, each.blocks)

    def _place(self, group: int, block: int, prefix: Prefix | None, moves: Moves) -> int:
        """Return a host block for device block `block`: one that holds `prefix`, or a copy on its way."""
        twin = None if prefix is None else self.caches[group].find(prefix)
        if twin is not None:
            self.pool.share(twin)
            return twin
        host_block = self.pool.allocate()
        self._start(moves.swap_out, SWAP_OUT, block, host_block)
        return host_block

    def swap_in(self, group: SequenceGroup, moves: Moves) -> None:
        """Bring what `swap_out` took into the device tables of `group`, which are empty.

        Raises OutOfBlocks only if fewer device blocks are available than the group's distinct host blocks.
        """
        placed: dict[int, int] = {}
        for sequence in group.live:
            tables = [
                WindowTable(each.first, self._bring_all(number, sequence, each, placed, moves))
                for number, each in enumerate(sequence.host_tables)
            ]
            sequence.table = tables.pop(0).blocks if sequence.host_table else []
            sequence.window_tables = tables
            self.drop(sequence)

    def _bring_all(
        self, group: int, sequence: Sequence, table: WindowTable, placed: dict[int, int], moves: Moves
    ) -> list[int]:
        """Return the device blocks for those of a host table; `placed`: those of other tables."""
        for logical, block in enumerate(table.blocks, table.first):
            kind = FORK
            if block in placed:
                self._device.share(placed[block])
            else:
                twin = None
                if logical < sequence.host_published:
                    twin = self._device_caches[group].find(sequence.prefixes[logical])
                if twin is not None:
                    self._device.share(twin)
                placed[block] = self.bring(block, moves) if twin is None else twin
                kind = ALLOCATE if twin is None else HIT
            self._ring.note_one(kind + KINDS * group, sequence, logical, placed[block])
        return [placed[block] for block in table.blocks]

    def bring(self, host_block: int, moves: Moves) -> int:
        """Return a new device block that the next step fills from `host_block`."""
        block = self._device.allocate()
        self._start(moves.swap_in, SWAP_IN, block, host_block)
        return block

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Have `child` share all blocks that `parent` has here, and no others."""
        self.drop(child)
        child.host_table = list(parent.host_table)
        child.prefixes = list(parent.prefixes)
        child.host_published = parent.host_published
        child.num_found = parent.num_found
        child.saved_context = parent.saved_context
        child.host_window_tables = [
            WindowTable(each.first, list(each.blocks)) for each in parent.host_window_tables
        ]
        for block in child.host_blocks:
            self.pool.share(block)
        self._note(FORK, child)

    def drop(self, sequence: Sequence) -> None:
        """Give back what `sequence` has here, last block first."""
        sequence.saved_context = sequence.host_published = 0
        self._note(RELEASE, sequence)
        for each in sequence.host_window_tables:
            self.pool.release(*reversed(each.blocks))
        sequence.host_window_tables = []
        while sequence.host_table:
            self.pool.release(sequence.host_table.pop())

    def spill(self, count: int, moves: Moves) -> None:
        """Copy those of the next `count` device blocks to be evicted that are not here yet.

        Most were found here by an earlier step, and are not looked for again until half as many blocks were
        evicted here: a full cache has many of them.
        """
        # What is spilled must not push out what has just been: at most half of the room is looked after.
        count = min(count, self.pool.num_available // 2)
        if self.pool.evictions < self._next_look:
            blocks = self._device.next_to_copy(count)
        else:
            blocks = self._device.next_to_evict(count)
            self._next_look = self.pool.evictions + max(count // 2, 1)
        for block in blocks:
            cache, device_cache = self._caches_of(block)
            prefix = device_cache.prefix(block)
            twin = cache.find(prefix)
            if twin is not None:
                self.pool.refresh(twin)
                self._device.mark_copied(block)
                continue
            if cache.collides(prefix):  # a copy could not be found, and would be made in each step
                continue
            self._start(moves.spills, SWAP_OUT, block, self.pool.allocate())
            self._ring.mark(ALLOCATE + HOST, moves.spills[-1].host)

    def _caches_of(self, block: int) -> tuple[PrefixCache, PrefixCache]:
        """Return the indices here and on the device of the group whose device block this is.

        If it has been forgotten meanwhile, they are those of some group.
        """
        return next((pair for pair in self._pairs if block in pair[1]), self._pairs[0])

    def _start(self, transfers: list[Transfer], kind: int, device: int, host: int) -> None:
        self._device.hold(device)
        self.pool.hold(host)
        self._ring.mark_pair(kind, device, host)
        transfers.append(Transfer(device, host))

    def arrived(self, moves: Moves) -> None:
        """Book the transfers of `moves`, which are done."""
        for spill in moves.spills:
            cache, device_cache = self._caches_of(spill.device)
            if spill.device in device_cache:  # else it was forgotten meanwhile
                self._publish(cache, device_cache.prefix(spill.device), spill.host)
        self.let_go(moves)

    def let_go(self, moves: Moves) -> None:
        """Let go of the blocks that the transfers of `moves` hold."""
        for transfer in reversed((*moves.swap_out, *moves.swap_in)):  # children before parents
            self._device.unhold(transfer.device)
            self.pool.unhold(transfer.host)
        for spill in moves.spills:
            self.pool.release(spill.host)
            self._ring.mark(RELEASE + HOST, spill.host)
            self.pool.unhold(spill.host)
        for spill in reversed(moves.spills):  # so that the order of eviction stays as it was
            self._device.unhold(spill.device, evict_next=True)

    def publish(self, group: SequenceGroup) -> None:
        """Let others find the full blocks of a swapped group, which have arrived here."""
        for sequence in group.live:
            published = sequence.prefixes[: sequence.host_published]
            for cache, table in zip(self.caches, sequence.host_tables, strict=False):
                for prefix, block in zip(published[table.first :], table.blocks, strict=False):
                    self._publish(cache, prefix, block)

    def _publish(self, cache: PrefixCache, prefix: Prefix, block: int) -> None:
        if cache.publish(prefix, block) == block:
            self.pool.keep(block)
