"""Sequences made by hand over a block manager, for tests that need no scheduler."""

from __future__ import annotations

from quire.engine.arrays import as_int32
from quire.engine.hashing import BlockHasher
from quire.engine.memory.invariants import check_memory
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.moves import Moves
from quire.engine.messages import Request, SamplingParams
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import Sequence, SequenceGroup


class Tables:
    """A block manager, and sequences in its rows that write as told."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        hasher: BlockHasher | None = None,
        num_host_blocks: int = 0,
        windows: tuple[int, ...] = (),
        keeps_all: bool = True,
        max_tokens: int = 1000,
    ) -> None:
        self.rows = Rows(16, max_tokens, block_size)
        self.blocks = BlockManager(
            num_blocks, block_size, self.rows, hasher, num_host_blocks, windows, keeps_all=keeps_all
        )
        self.sequences: list[Sequence] = []

    def group(self, prompt: list[int], n: int = 1, salt: str = "") -> list[Sequence]:
        """Sequences in rows, without blocks."""
        request = Request(len(self.sequences), prompt, SamplingParams(n=n, max_tokens=1000), cache_salt=salt)
        group = SequenceGroup(request, as_int32(request.prompt), request.id, ())
        for sequence in group.sequences:
            self.rows.assign(sequence)
        self.sequences += group.sequences
        return group.sequences

    def write(self, sequence: Sequence, tokens: list[int]) -> None:
        """Compute the rest of the prompt, if it is not in the cache, and then `tokens`."""
        for token in tokens:
            sequence.append(token)
        for position in range(int(self.rows.context[sequence.row]), len(sequence.tokens)):
            self.blocks.grow(sequence, position + 1)
            while not self.blocks.is_writable(sequence, position):
                self.blocks.copy_on_write(sequence, position)
            self.rows.context[sequence.row] = position + 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        child.take_tokens(parent)
        self.blocks.fork(parent, child)
        self.rows.context[child.row] = self.rows.context[parent.row]

    def follow(self, parent: Sequence, child: Sequence) -> None:
        child.take_tokens(parent)
        self.blocks.follow_all([(parent, child)])
        self.rows.context[child.row] = self.rows.context[parent.row]

    def leave(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.blocks.free(sequence)
            self.rows.release(sequence)

    def step(self) -> Moves:
        """Do and commit all that has gathered; full blocks are findable then."""
        moves = self.blocks.take_moves()
        self.blocks.copied(moves)
        self.blocks.host.arrived(moves)
        for sequence in self.sequences:
            if sequence.row >= 0:
                context = int(self.rows.context[sequence.row])
                self.blocks.publish([(sequence, context // self.blocks.block_size)])
        self.check()
        return moves

    def check(self) -> None:
        check_memory(self.blocks, [s for s in self.sequences if s.finish_reason is None], [])
        for sequence in self.sequences:
            if sequence.row >= 0:
                assert self.rows.capacity[sequence.row] == sequence.num_blocks * self.blocks.block_size

    def counts(self, sequence: Sequence) -> list[int]:
        """Return how many tables name each block of `sequence`."""
        return [self.blocks.pool.count(block) for block in sequence.table]
