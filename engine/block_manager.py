"""Block tables: growing, forking, copying on write and freeing them."""

from __future__ import annotations

from collections.abc import Iterable

from engine.block_pool import BlockPool

BlockTable = list[int]


class BlockManager:
    """Keeps block tables backed by a pool (PagedAttention, sections 4.2 to 4.4).

    A table is a list of block ids; logical block i of a sequence is table[i] and holds the keys and
    values of positions i * block_size onwards. Tables that share a block each hold a reference to it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.copies_on_write = 0  # since start

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """How many blocks `table` lacks to hold `num_tokens`."""
        return max(0, self.blocks_for(num_tokens) - len(table))

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Grow `table` to hold `num_tokens`. Raises OutOfBlocks; what was added by then stays."""
        for _ in range(self.missing(table, num_tokens)):
            table.append(self.pool.allocate())

    def fork(self, table: BlockTable, num_blocks: int | None = None) -> BlockTable:
        """A new table that shares the first `num_blocks` (all by default) of `table`."""
        shared = table[:num_blocks]
        for block in shared:
            self.pool.share(block)
        return shared

    def is_shared(self, table: BlockTable, logical: int) -> bool:
        return self.pool.count(table[logical]) > 1

    def copy_on_write(self, table: BlockTable, logical: int) -> tuple[int, int]:
        """Make shared block `logical` private before a write: (source, destination) of the copy to do.

        Raises OutOfBlocks and leaves the table as it was.
        """
        source = table[logical]
        assert self.pool.count(source) > 1, f"block {source} has one owner and needs no copy"
        table[logical] = self.pool.allocate()
        self.pool.release(source)
        self.copies_on_write += 1
        return source, table[logical]

    def free(self, table: BlockTable) -> None:
        """Give every block back, last first, and leave the table empty."""
        while table:
            self.pool.release(table.pop())

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Assert every invariant, given all tables that exist."""
        tables = list(tables)
        self.pool.check(tables)
        for table in tables:
            assert len(set(table)) == len(table), f"a table names a block twice: {table}"
