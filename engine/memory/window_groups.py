"""Block tables of layers that see a window: what is behind it is given back while a sequence goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine.hashing import Prefix
from quire.engine.memory.move_kinds import ALLOCATE, COPY, FORK, HIT, RELEASE
from quire.engine.memory.move_ring import MoveRing
from quire.engine.memory.moves import Moves
from quire.engine.memory.pool import BlockPool
from quire.engine.memory.prefix_cache import Found, PrefixCache
from quire.engine.memory.window_blocks import WindowBlocks
from quire.engine.memory.window_group import WindowGroup
from quire.engine.memory.window_match import WindowMatch, match_windows
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import Sequence as TokenSequence
from quire.engine.sequences.window_table import WindowTable


class WindowGroups:
    """The cache groups after the one that keeps all tokens, or all groups where no layer does.

    All draw blocks from one pool, and a group's logical block i is of the same tokens in each. What is done
    to a sequence's table is done to its window tables here; the manager says when.
    """

    def __init__(
        self, windows: Sequence[int], first: int, block_size: int, pool: BlockPool, rows: Rows, ring: MoveRing
    ) -> None:
        """first: the number of the first of them."""
        self._ring = ring
        self._groups = [
            WindowGroup(number, window, block_size, rows.stride, pool.num_blocks, ring)
            for number, window in enumerate(windows, first)
        ]
        self._block_size = block_size
        self._pool = pool
        self._rows = rows

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def windows(self) -> list[int]:
        """Return how many of the last tokens each group keeps."""
        return [group.window for group in self._groups]

    @property
    def depths(self) -> list[int]:
        """Return how many of a prompt's last blocks the token behind them reads in each group."""
        return [group.depth for group in self._groups]

    @property
    def caches(self) -> list[PrefixCache]:
        return [group.cache for group in self._groups]

    def _tables(self, sequence: TokenSequence) -> list[tuple[WindowGroup, int, WindowTable]]:
        """Return each group, where the device has its table of `sequence`, and that, if it has blocks."""
        row, tables = sequence.row, sequence.window_tables
        return [
            (group, group.first_table + row, table)
            for group, table in zip(self._groups, tables, strict=bool(tables))
        ]

    def _begin(self, sequence: TokenSequence) -> None:
        if not sequence.window_tables:
            sequence.window_tables = [WindowTable() for _ in self._groups]

    def _note_given_back(self, sequence: TokenSequence) -> None:
        blocks = sum(table.first for table in sequence.window_tables)
        self._rows.given_back[sequence.row] = blocks * self._block_size

    # -- growing and sharing ---------------------------------------------------------------------------

    def grow(self, sequence: TokenSequence, blocks: list[int], moves: Moves) -> None:
        """Add `blocks` to the tables of `sequence`, to each as many."""
        self._begin(sequence)
        count = len(blocks) // len(self._groups)
        for at, (group, row, table) in enumerate(self._tables(sequence)):
            own, end = blocks[at * count : (at + 1) * count], table.end
            self._ring.note(ALLOCATE + group.mark, sequence, end, own)
            moves.enter(row, end, own)
            table.blocks += own

    def fork(self, parent: TokenSequence, child: TokenSequence, end: int, moves: Moves) -> None:
        """Have `child` share the blocks that `parent` has before logical block `end`, and no others."""
        self._begin(child)
        self._begin(parent)
        for (group, _, own), table in zip(self._tables(child), parent.window_tables, strict=True):
            blocks = table.blocks[: max(0, end - table.first)]
            self._replace(group, child, own, table.first, blocks, moves)
        self._note_given_back(child)

    def follow_all(
        self, pairs: Sequence[tuple[TokenSequence, TokenSequence]], positions: list[int], moves: Moves
    ) -> tuple[int, list[TokenSequence]]:
        """Do as `FullGroup.follow_all`."""
        copies: int = 0
        sharing: list[TokenSequence] = []
        for (parent, child), position in zip(pairs, positions, strict=True):
            logical, begun = position // self._block_size, position % self._block_size > 0
            self._begin(child)
            self._begin(parent)
            for (group, row, own), table in zip(self._tables(child), parent.window_tables, strict=True):
                blocks = list(table.blocks)
                kept = begun and own.first <= logical < own.end and self._is_own(group, own.block(logical))
                copied = kept and not self._pool.is_held(own.block(logical))
                if copied:
                    blocks[logical - table.first] = own.block(logical)
                self._replace(group, child, own, table.first, blocks, moves)
                if copied:
                    self._copy(group, row, table.block(logical), own.block(logical), moves)
                    copies += 1
                elif begun:
                    sharing.append(child)
            self._note_given_back(child)
        return copies, sharing

    def _replace(
        self,
        group: WindowGroup,
        sequence: TokenSequence,
        table: WindowTable,
        first: int,
        blocks: list[int],
        moves: Moves,
    ) -> None:
        """Have `table`, of `sequence`, name `blocks` from logical block `first` on, instead of its own."""
        row = group.table_row(sequence.row)
        before = dict(enumerate(table.blocks, table.first))
        table.first, table.blocks = first, list(blocks)
        given_back: list[int] = []
        for logical, new in enumerate(blocks, first):
            old = before.pop(logical, None)
            if old == new:
                continue
            self._pool.share(new)
            moves.entries[row, logical] = new
            if old is not None:
                self._ring.note_one(RELEASE + group.mark, sequence, logical, old)
                given_back.append(old)
            self._ring.note_one(FORK + group.mark, sequence, logical, new)
        for logical, old in before.items():
            self._ring.note_one(RELEASE + group.mark, sequence, logical, old)
            moves.entries.pop((row, logical), None)
            given_back.append(old)
        if given_back:
            moves.release(given_back, self._pool, group.cache)
            moves.undo_copy(row, self._pool)

    def _is_own(self, group: WindowGroup, block: int) -> bool:
        return self._pool.count(block) == 1 and block not in group.cache

    def is_writable(self, sequence: TokenSequence, logical: int) -> bool:
        """Return whether each group has a block there that is this sequence's alone and not findable."""
        return all(
            logical >= table.first and self._is_own(group, table.block(logical))
            for group, _, table in self._tables(sequence)
        )

    def copy_on_write(self, sequence: TokenSequence, logical: int, moves: Moves) -> None:
        """Give `sequence` its own copy of the first group's block that others name. May raise OutOfBlocks."""
        for group, row, table in self._tables(sequence):
            source = table.block(logical)
            if not self._is_own(group, source):
                destination = self._pool.allocate()
                self._copy(group, row, source, destination, moves)
                moves.release([source], self._pool, group.cache)
                self._ring.note_one(RELEASE + group.mark, sequence, logical, source)
                self._ring.note_one(ALLOCATE + group.mark, sequence, logical, destination)
                table.blocks[logical - table.first] = destination
                moves.entries[row, logical] = destination
                return

    def _copy(self, group: WindowGroup, row: int, source: int, destination: int, moves: Moves) -> None:
        assert source not in moves.written, "a copy is made before the step writes its source"
        assert row not in moves.copies, "a table has two copies in one plan"
        self._pool.hold(source)
        self._ring.mark_pair(COPY + group.mark, destination, source)
        moves.copies[row] = source, destination

    # -- giving back -----------------------------------------------------------------------------------

    def give_back_behind(self, sequence: TokenSequence, position: int, moves: Moves) -> int:
        """Give back the blocks that tokens from `position` on do not read; return how many.

        The device's tables keep what they name there, which no kernel looks at.
        """
        total = 0
        for group, row, table in self._tables(sequence):
            first = table.first
            count = min(group.first_block(position) - first, len(table.blocks))
            if count <= 0:
                continue
            behind = table.blocks[:count]
            del table.blocks[:count]
            moves.leave(row, first, first + count)
            self._ring.note(RELEASE + group.mark, sequence, first, behind)
            table.first = first + count
            moves.release(behind, self._pool, group.cache)
            total += count
        if total:
            self._note_given_back(sequence)
        return total

    def trim(self, sequence: TokenSequence, end: int, moves: Moves) -> None:
        """Give back blocks from logical block `end` on, which were taken for tokens not computed now."""
        for group, row, table in self._tables(sequence):
            while table.end > end:
                block = table.blocks.pop()
                self._pool.release(block)
                self._ring.note_one(RELEASE + group.mark, sequence, table.end, block)
                moves.entries.pop((row, table.end), None)

    def tell(self, sequence: TokenSequence, moves: Moves) -> None:
        """Send the device the whole tables of `sequence`."""
        for _, row, table in self._tables(sequence):
            moves.enter(row, table.first, table.blocks)
        self._note_given_back(sequence)

    def free(self, sequence: TokenSequence, moves: Moves) -> None:
        """Give every block back."""
        for group, row, table in self._tables(sequence):
            self._ring.note(RELEASE + group.mark, sequence, table.first, table.blocks)
            moves.release(table.blocks, self._pool, group.cache)
            moves.leave(row, table.first, table.end)
            moves.undo_copy(row, self._pool)
        sequence.window_tables = []
        self._rows.given_back[sequence.row] = 0

    # -- content ---------------------------------------------------------------------------------------

    def match(self, prefixes: list[Prefix], most: int) -> tuple[int, tuple[WindowBlocks, ...]]:
        """Return behind how many blocks, up to `most`, a sequence can go on; and what it reads there.

        All that is on the device.
        """
        return match_windows(self._groups, prefixes, most, self._block_size, ())

    def begin_match(self, prefixes: list[Prefix], host_caches: Sequence[PrefixCache]) -> WindowMatch:
        """Begin to find the same for a sequence that waits.

        What is not on the device may be in `host_caches`, the groups' indices of host memory, or none.
        """
        return WindowMatch(self._groups, prefixes, self._block_size, host_caches)

    def blocks_behind(self, num_blocks: int) -> int:
        """Return how many blocks of all groups a sequence reads that goes on behind `num_blocks`."""
        position = num_blocks * self._block_size
        return sum(num_blocks - min(num_blocks, group.first_block(position)) for group in self._groups)

    def reaches(self, sequence: TokenSequence, position: int) -> bool:
        """Return whether `sequence` still has what a token at `position`, which it has passed, reads."""
        firsts, tables = self.first_blocks(position), sequence.window_tables
        return all(table.first <= first for first, table in zip(firsts, tables, strict=bool(tables)))

    def first_blocks(self, position: int) -> list[int]:
        """Return the first logical block that tokens from `position` on read in each group."""
        return [group.first_block(position) for group in self._groups]

    def attach(self, sequence: TokenSequence, found: Found) -> int:
        """Begin the tables of `sequence` with what was found on the device.

        Return the first block that is not there yet: it is computing, or `bring` takes it from host memory.
        """
        self._begin(sequence)
        there = end = len(found)
        for (group, _, table), part in zip(self._tables(sequence), found.windows, strict=bool(found)):
            table.first, table.blocks = part.first, list(part.blocks)
            for logical, block in enumerate(part.blocks, part.first):
                if logical not in part.on_host:
                    self._pool.share(block)
                    self._ring.note_one(HIT + group.mark, sequence, logical, block)
                if logical in part.on_host or block in group.cache.computing:
                    there = min(there, logical)
            assert table.end == end, "not all that was found of a window group"
        return there

    def bring(self, sequence: TokenSequence, found: Found, bring: Callable[[int], int]) -> None:
        """Have blocks of the device, which `bring` gives for host blocks, in what `attach` began."""
        for (group, _, table), part in zip(self._tables(sequence), found.windows, strict=bool(found)):
            for logical in sorted(part.on_host):
                block = bring(table.block(logical))
                self._ring.note_one(ALLOCATE + group.mark, sequence, logical, block)
                table.blocks[logical - table.first] = block

    def mark_computing(
        self, sequence: TokenSequence, prefixes: list[Prefix], begin: int, end: int, moves: Moves
    ) -> None:
        """Let others share the logical blocks begin..end-1, which the next plan fills."""
        for group, _, table in self._tables(sequence):
            first = max(begin, table.first)
            blocks = table.blocks[first - table.first : max(0, end - table.first)]
            group.cache.mark_computing(prefixes[first:end], blocks)
            moves.written.update(blocks)

    def publish(
        self, sequence: TokenSequence, prefixes: list[Prefix], begin: int, end: int, moves: Moves
    ) -> int:
        """Make the logical blocks begin..end-1 findable for good; as `BlockManager.publish`."""
        for group, row, table in self._tables(sequence):
            publish, first = group.cache.publish, table.first
            for logical in range(max(begin, first), end):
                block = table.blocks[logical - first]
                found = publish(prefixes[logical], block)
                if found == block:
                    self._pool.keep(block)
                elif found is not None and self._pool.count(block) == 1:
                    self._pool.share(found)
                    self._pool.release(block)
                    self._ring.note_one(RELEASE + group.mark, sequence, logical, block)
                    self._ring.note_one(FORK + group.mark, sequence, logical, found)
                    table.blocks[logical - first] = found
                    moves.entries[row, logical] = found
        return max(begin, end)
