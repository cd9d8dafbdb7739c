"""Block tables of layers that keep all tokens: the first cache group."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from itertools import zip_longest

from quire.engine.hashing import Prefix
from quire.engine.memory.move_kinds import ALLOCATE, COPY, FORK, HIT, RELEASE
from quire.engine.memory.move_ring import MoveRing
from quire.engine.memory.moves import Moves
from quire.engine.memory.pinned_tails import PinnedTails
from quire.engine.memory.pool import BlockPool
from quire.engine.memory.prefix_cache import Found, PrefixCache
from quire.engine.sequences.rows import Index, Rows
from quire.engine.sequences.sequence import BlockTable, Sequence


class FullGroup:
    """Does to `Sequence.table` what is done to a sequence's tables; the manager says when."""

    def __init__(
        self, block_size: int, pool: BlockPool, rows: Rows, tails: PinnedTails, ring: MoveRing
    ) -> None:
        self.cache = PrefixCache(pool.num_blocks, ring)
        self._block_size = block_size
        self._pool = pool
        self._rows = rows
        self._tails = tails
        self._ring = ring

    def __len__(self) -> int:
        return 1

    @property
    def caches(self) -> list[PrefixCache]:
        return [self.cache]

    # -- growing and sharing ---------------------------------------------------------------------------

    def grow(self, sequence: Sequence, blocks: list[int], moves: Moves) -> None:
        """Add `blocks` to the table of `sequence`."""
        table = sequence.table
        moves.enter(sequence.row, len(table), blocks)
        self._ring.note(ALLOCATE, sequence, len(table), blocks)
        table += blocks

    def grow_all(self, rows: Index, blocks: list[int], moves: Moves) -> None:
        """Add one of `blocks` to the table of each of these rows."""
        entries, sequences, note = moves.entries, self._rows.sequences, self._ring.note_one
        for row, block in zip(rows.tolist(), blocks, strict=True):
            table = sequences[row].table
            entries[row, len(table)] = block
            note(ALLOCATE, sequences[row], len(table), block)
            table.append(block)

    def fork(self, parent: Sequence, child: Sequence, end: int, moves: Moves) -> None:
        """Have `child` share the blocks that `parent` has before logical block `end`, and no others."""
        given_back = self._replace(child, parent.table[:end], moves)
        if given_back:
            moves.release(given_back, self._pool, self.cache)
            moves.undo_copy(child.row, self._pool)

    def follow_all(
        self, pairs: Listed[tuple[Sequence, Sequence]], positions: list[int], moves: Moves
    ) -> tuple[int, list[Sequence]]:
        """Do as `BlockManager.follow_all`, of parents at `positions`.

        Return how many blocks are copied, and the children that share one instead.
        """
        copies: list[tuple[Sequence, int, int]] = []
        sharing: list[Sequence] = []
        given_back: list[int] = []
        for (parent, child), position in zip(pairs, positions, strict=True):
            logical, begun = divmod(position, self._block_size)
            theirs, own = parent.table, child.table
            table = theirs.copy()
            if begun:
                if (
                    logical < len(own)
                    and self.is_writable(child, logical)
                    and not self._pool.is_held(own[logical])
                ):
                    table[logical] = own[logical]
                    copies.append((child, theirs[logical], own[logical]))
                else:
                    sharing.append(child)
            if table != own:
                given_back[:0] = self._replace(child, table, moves)
        moves.release(given_back, self._pool, self.cache)
        self._copy_all(copies, moves)
        return len(copies), sharing

    def _replace(self, sequence: Sequence, table: BlockTable, moves: Moves) -> list[int]:
        """Have `sequence` name the blocks of `table` instead of its own, and return those to release.

        Those that it names already stay untouched: of beams that is nearly all, at each step.
        """
        before, sequence.table = sequence.table, table
        given_back: list[int] = []
        for logical, (old, new) in enumerate(zip_longest(before, table)):
            if old == new:
                continue
            if old is not None:
                self._ring.note_one(RELEASE, sequence, logical, old)
            if new is None:
                moves.entries.pop((sequence.row, logical), None)
            else:
                self._pool.share(new)
                self._ring.note_one(FORK, sequence, logical, new)
                moves.entries[sequence.row, logical] = new
            if old is not None:
                given_back.append(old)
        return given_back

    def is_writable(self, sequence: Sequence, logical: int) -> bool:
        """Return whether the block there is this sequence's alone and not findable."""
        block = sequence.table[logical]
        return self._pool.count(block) == 1 and block not in self._tails and block not in self.cache

    def copy_on_write(self, sequence: Sequence, logical: int, moves: Moves) -> None:
        """Give `sequence` its own copy of the block there. OutOfBlocks: nothing has changed."""
        source, destination = sequence.table[logical], self._pool.allocate()
        self._copy_all([(sequence, source, destination)], moves)
        moves.release([source], self._pool, self.cache)
        self._ring.note_one(RELEASE, sequence, logical, source)
        self._ring.note_one(ALLOCATE, sequence, logical, destination)
        sequence.table[logical] = destination
        moves.entries[sequence.row, logical] = destination

    def _copy_all(self, copies: list[tuple[Sequence, int, int]], moves: Moves) -> None:
        """Have the next plan copy blocks for sequences: each of one to another, which its table names."""
        hold, note = self._pool.hold, self._ring.note
        for sequence, source, destination in copies:
            assert source not in moves.written, "a copy is made before the step writes its source"
            assert sequence.row not in moves.copies, "a row has two copies in one plan"
            hold(source)  # nobody may get it before the copy was made
            note(COPY, sequence, 0, (destination, source))
            moves.copies[sequence.row] = source, destination

    # -- giving back -----------------------------------------------------------------------------------

    def trim(self, sequence: Sequence, end: int, moves: Moves) -> None:
        """Give back blocks from logical block `end` on, which were taken for tokens not computed now."""
        table = sequence.table
        while len(table) > end:
            block = table.pop()
            self._pool.release(block)
            self._ring.note(RELEASE, sequence, len(table), (block,))
            moves.entries.pop((sequence.row, len(table)), None)

    def free(self, sequence: Sequence, moves: Moves) -> None:
        """Give every block back."""
        table, sequence.table = sequence.table, []
        self._ring.note(RELEASE, sequence, 0, table)
        moves.release(table, self._pool, self.cache)
        moves.leave(sequence.row, 0, len(table))
        moves.undo_copy(sequence.row, self._pool)

    def tell(self, sequence: Sequence, moves: Moves) -> None:
        """Send the device the whole table of `sequence`."""
        moves.enter(sequence.row, 0, sequence.table)

    # -- content ---------------------------------------------------------------------------------------

    def attach(self, sequence: Sequence, found: Found) -> int:
        """Begin the table of `sequence` with what was found on the device.

        Return the first block that is not there yet: it is computing, or `bring` takes it from host memory.
        """
        for block in found.device:
            self._pool.share(block)
        sequence.table = list(found.device)
        computing = (i for i, block in enumerate(found.device) if block in self.cache.computing)
        there = next(computing, len(found.device))
        self._ring.note(HIT, sequence, 0, found.device[:there])
        self._ring.note(FORK, sequence, there, found.device[there:])
        return there

    def bring(self, sequence: Sequence, found: Found, bring: Callable[[int], int]) -> None:
        """Go on with blocks of the device, which `bring` gives for host blocks, and with a pinned tail."""
        table = sequence.table
        for block in found.host:
            table.append(bring(block))
        self._ring.note(ALLOCATE, sequence, len(found.device), table[len(found.device) :])
        if found.tail is not None:
            self._pool.share(found.tail.block)
            self._ring.note(HIT, sequence, len(table), (found.tail.block,))
            table.append(found.tail.block)

    def mark_computing(
        self, sequence: Sequence, prefixes: list[Prefix], begin: int, end: int, moves: Moves
    ) -> None:
        """Let others share the logical blocks begin..end-1, which the next plan fills."""
        blocks = sequence.table[begin:end]
        self.cache.mark_computing(prefixes[begin:end], blocks)
        moves.written.update(blocks)

    def publish(self, sequence: Sequence, prefixes: list[Prefix], begin: int, end: int, moves: Moves) -> int:
        """Make the logical blocks begin..end-1 findable for good; as `BlockManager.publish`.

        Return before which of them that ended.
        """
        pool, publish, table = self._pool, self.cache.publish, sequence.table
        for logical in range(begin, end):
            block = table[logical]
            found = publish(prefixes[logical], block)
            if found == block:
                pool.keep(block)
            elif found is None:
                return logical  # a collision: what comes after it would not be found
            elif pool.count(block) == 1:
                pool.share(found)
                pool.release(block)
                self._ring.note_one(RELEASE, sequence, logical, block)
                self._ring.note_one(FORK, sequence, logical, found)
                table[logical] = found
                moves.entries[sequence.row, logical] = found
        return max(begin, end)
