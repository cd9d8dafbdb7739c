"""Block tables of running sequences: growing, sharing, copying on write, publishing and freeing them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.prefix_cache import BlockHasher, PrefixCache
from engine.rows import Rows
from engine.sequence import Sequence


@dataclass(slots=True)
class Moves:
    """What the next plan must tell the device about blocks, row by row, so that it can be undone."""

    entries: dict[tuple[int, int], int] = field(default_factory=dict)  # (row, logical block) -> block
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (row, source, destination)


class BlockManager:
    """Keeps the tables of sequences in rows backed by blocks (PagedAttention, sections 4.2 to 4.4).

    Logical block i of a sequence is table[i] and holds the keys and values of positions i * block_size
    onwards. A block is written only by the one table that names it, and never once it is full: full blocks
    become findable by content when the step that filled them was committed.
    """

    def __init__(self, num_blocks: int, block_size: int, rows: Rows, hasher: BlockHasher | None) -> None:
        self.cache = PrefixCache()
        self.pool = BlockPool(num_blocks, self.cache.forget)
        self.block_size = block_size
        self.moves = Moves()
        self.copies_on_write = 0  # since start
        self._hasher = hasher
        self._rows = rows

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take_moves(self) -> Moves:
        """What has gathered for the next plan. The sources of its copies must be unheld at its commit."""
        moves, self.moves = self.moves, Moves()
        return moves

    # -- growing and sharing ---------------------------------------------------------------------------

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Back `num_tokens` with blocks. Raises OutOfBlocks; what was added by then stays."""
        held = len(sequence.table)
        try:
            for _ in range(self.blocks_for(num_tokens) - held):
                sequence.table.append(self.pool.allocate())
        finally:
            self._tell(sequence, held)

    def fork(self, parent: Sequence, child: Sequence, num_blocks: int | None = None) -> None:
        """`child`, which has none, shares the first `num_blocks` (all by default) of `parent`'s blocks."""
        assert not child.table
        child.table = parent.table[:num_blocks]
        for block in child.table:
            self.pool.share(block)
        self._tell(child, 0)

    def is_writable(self, sequence: Sequence, position: int) -> bool:
        """Whether the block of `position` is this table's alone and not findable by others."""
        block = sequence.table[position // self.block_size]
        return self.pool.count(block) == 1 and not self.pool.is_kept(block)

    def copy_on_write(self, sequence: Sequence, position: int) -> None:
        """Give `sequence` its own copy of the block of `position`. OutOfBlocks: nothing has changed."""
        logical = position // self.block_size
        source = sequence.table[logical]
        destination = self.pool.allocate()
        self.pool.hold(source)  # nobody may get it before the copy was made
        self.pool.release(source)
        sequence.table[logical] = destination
        self.moves.copies.append((sequence.row, source, destination))
        self.moves.entries[sequence.row, logical] = destination
        self.copies_on_write += 1

    def free(self, sequence: Sequence) -> None:
        """Give every block back, last first, so that what is cached is evicted children before parents."""
        while sequence.table:
            self.pool.release(sequence.table.pop())
        sequence.published = 0
        self._forget_moves(sequence.row)

    def _forget_moves(self, row: int) -> None:
        """The next plan must not touch `row` on behalf of a sequence that has left it."""
        moves = self.moves
        if moves.entries:
            moves.entries = {key: block for key, block in moves.entries.items() if key[0] != row}
        if moves.copies:
            for owner, source, _ in moves.copies:
                if owner == row:
                    self.pool.unhold(source)
            moves.copies = [copy for copy in moves.copies if copy[0] != row]

    def _tell(self, sequence: Sequence, held: int) -> None:
        table, row = sequence.table, sequence.row
        for logical in range(held, len(table)):
            self.moves.entries[row, logical] = table[logical]
        self._rows.capacity[row] = len(table) * self.block_size

    # -- content ---------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the first tokens of `sequence`, as many as are findable."""
        if self._hasher is None:
            return []
        self._digest(self._hasher, sequence, len(sequence.tokens) // self.block_size)
        found: list[int] = []
        for digest, piece in zip(sequence.digests, self._hasher.pieces(sequence.tokens), strict=True):
            block = self.cache.find(digest, piece)
            if block is None:
                break
            found.append(block)
        return found

    def attach(self, sequence: Sequence, found: list[int]) -> None:
        """Begin the table of `sequence`, which has none, with blocks that `match` gave."""
        assert not sequence.table
        for block in found:
            self.pool.share(block)
        sequence.table = list(found)
        sequence.published = len(found)
        self._tell(sequence, 0)

    def publish(self, sequence: Sequence, num_blocks: int) -> None:
        """The first `num_blocks` of `sequence` are full and written: make them findable.

        A block whose content is findable elsewhere is given back and that one shared instead.
        """
        if self._hasher is None or sequence.published >= num_blocks:
            return
        self._digest(self._hasher, sequence, num_blocks)
        first = sequence.published
        pieces = self._hasher.pieces(sequence.tokens[: num_blocks * self.block_size], first)
        for logical, piece in enumerate(pieces, first):
            digest, block = sequence.digests[logical], sequence.table[logical]
            twin = self.cache.find(digest, piece)
            if twin is None:
                if not self.pool.is_kept(block) and self.cache.publish(digest, piece, block):
                    self.pool.keep(block)
            elif twin != block:
                self.pool.share(twin)
                self.pool.release(block)
                sequence.table[logical] = twin
                self.moves.entries[sequence.row, logical] = twin
        sequence.published = num_blocks

    def _digest(self, hasher: BlockHasher, sequence: Sequence, num_blocks: int) -> None:
        """Extend the chain of digests to `num_blocks`."""
        digests = sequence.digests
        if len(digests) >= num_blocks:
            return
        before = digests[-1] if digests else hasher.root(sequence.group.request.cache_salt)
        tokens = sequence.tokens[: num_blocks * self.block_size]
        for piece in hasher.pieces(tokens, len(digests)):
            before = hasher.next(before, piece)
            digests.append(before)

    def check(self, sequences: Iterable[Sequence], holds: Iterable[int]) -> None:
        """Assert every invariant, given all sequences that have tables and all holds of plans under way."""
        tables = [sequence.table for sequence in sequences]
        self.pool.check(tables, holds)
        self.cache.check()
        for table in tables:
            assert len(set(table)) == len(table), f"a table names a block twice: {table}"
        assert len(self.cache) == sum(self.pool.is_kept(block) for block in range(self.pool.num_blocks))
