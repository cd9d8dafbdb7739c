"""A pool of KV blocks to play with: the block manager that serves, and no model."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from quire.engine.lab.drawing import draw
from quire.engine.lab.paths import Call
from quire.engine.lab.sequence import PoolSequence
from quire.engine.lab.state import LabState
from quire.engine.lab.view import LabBlock, LabPool, LabSequence
from quire.engine.memory.invariants import check_memory
from quire.engine.memory.pool import OutOfBlocks

MAX_BLOCKS = 1 << 17
MAX_BLOCK_SIZE = 128


class Pool:
    """The block manager that serves, over blocks without keys and values (PagedAttention, 4.2 to 4.5)."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 16, num_host_blocks: int | None = None
    ) -> None:
        """Host memory has as many blocks as the device if `num_host_blocks` is left out."""
        host = num_blocks if num_host_blocks is None else num_host_blocks
        for name, value, least, most in (
            ("num_blocks", num_blocks, 1, MAX_BLOCKS),
            ("block_size", block_size, 1, MAX_BLOCK_SIZE),
            ("num_host_blocks", host, 0, MAX_BLOCKS),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name} must be between {least} and {most}, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._state = LabState(num_blocks, block_size, host)
        self._blocks = self._state.blocks

    # -- operations ------------------------------------------------------------------------------------

    def sequence(self, text: str | None = None) -> PoolSequence:
        """Begin a sequence without tokens. Those of the same `text` get the same tokens; else its own."""
        state = self._state
        with state.doing("new sequence"):
            begun = PoolSequence(state, state.begin(state.voice_of(text)))
            state.said = f"Sequence {begun.id} has no tokens, and so no block."
        return begun

    def evict(self) -> int:
        """Free the block that was cached first, whose content is forgotten; return it."""
        with self._state.doing("evict"):
            if not self._blocks.pool.next_to_evict(1):
                raise OutOfBlocks("no block is cached, publish a sequence's blocks and free it first")
            block = self._blocks.pool.evict()
            self._state.said = f"Block {block} was cached first: it is free, and its content is forgotten."
        return block

    # -- what there is ---------------------------------------------------------------------------------

    @property
    def sequences(self) -> list[PoolSequence]:
        """Return those that were not freed."""
        return [PoolSequence(self._state, number) for number in self._state.members]

    @property
    def used(self) -> int:
        """Return how many device blocks tables name."""
        return self._blocks.pool.num_active

    @property
    def cached(self) -> int:
        """Return how many device blocks hold published content and are named by no table."""
        return self._blocks.pool.num_cached

    @property
    def free(self) -> int:
        return self._blocks.pool.num_free

    @property
    def host_used(self) -> int:
        """Return how many host blocks sequences have while they are swapped out."""
        return self._blocks.host.pool.num_active

    @property
    def reference_counts(self) -> Counter[int]:
        """Return by device block how many tables name it.

        Blocks that none names are left out, and count 0.
        """
        count = self._blocks.pool.count
        return Counter({block: count(block) for block in range(self.num_blocks) if count(block)})

    @property
    def copies(self) -> int:
        """Return how many blocks were copied on write, since the beginning."""
        return self._blocks.copies_on_write

    @property
    def naive(self) -> int:
        """Return how many blocks the device's sequences would take if each had its own copy of everything."""
        on_device = [sequence for sequence in self.sequences if not sequence.is_swapped_out]
        return sum(self._blocks.blocks_for(sequence.num_tokens) for sequence in on_device)

    @property
    def fragmentation(self) -> float:
        """Return the part of the used blocks' room that holds no token."""
        room = self.used * self.block_size
        return 1 - self._filled().total() / room if room else 0.0

    @property
    def said(self) -> str:
        """Return what the last operation did, or why it did nothing."""
        return self._state.said

    @property
    def path(self) -> list[Call]:
        """Return the functions of the block manager that the last operation ran."""
        return self._state.path

    def check(self) -> None:
        """Assert what must hold of the blocks: each count is the tables that name it, and none is lost."""
        check_memory(self._blocks, [member.sequence for member in self._state.members.values()], [])

    def view(self) -> LabPool:
        """Return all there is to see, as plain data."""
        return LabPool(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            used=self.used,
            cached=self.cached,
            free=self.free,
            host_used=self.host_used,
            copies=self.copies,
            naive=self.naive,
            fragmentation=self.fragmentation,
            operation=self._state.operation,
            said=self.said,
            path=self.path,
            blocks=self._view_blocks(),
            sequences=[
                LabSequence(each.id, each.num_tokens, each.block_table, each.host_table, each.parent)
                for each in self.sequences
            ],
        )

    def _view_blocks(self) -> list[LabBlock]:
        filled, counts, cache = self._filled(), self.reference_counts, self._blocks.cache
        blocks = []
        for block in range(self.num_blocks):
            state: Literal["free", "active", "cached"] = "free"
            if counts[block]:
                state = "active"
            elif self._blocks.pool.is_kept(block):
                state = "cached"
            tokens = self.block_size if state == "cached" else filled[block]
            blocks.append(LabBlock(state, counts[block], tokens, block in cache))
        return blocks

    def _filled(self) -> Counter[int]:
        """Return how many tokens each block of a table holds."""
        filled: Counter[int] = Counter()
        for sequence in self.sequences:
            for logical, block in enumerate(sequence.block_table):
                tokens = min(self.block_size, sequence.num_tokens - logical * self.block_size)
                filled[block] = max(filled[block], tokens)
        return filled

    def _repr_html_(self) -> str:
        return draw(self.view())

    def __repr__(self) -> str:
        return (
            f"Pool({self.num_blocks} blocks of {self.block_size} tokens: {self.used} used, {self.cached} "
            f"cached, {self.free} free; {self.copies} copies; {self.naive} without sharing)"
        )
