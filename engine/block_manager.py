"""Block tables of running sequences: growing, sharing, copying on write, publishing and freeing them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.host_tier import HostTier, Transfer
from engine.prefix_cache import BlockHasher, Digest, PrefixCache
from engine.rows import Rows
from engine.sequence import Sequence, SequenceGroup


@dataclass(slots=True)
class Moves:
    """What the next plan must tell the device about blocks, row by row, so that it can be undone."""

    entries: dict[tuple[int, int], int] = field(default_factory=dict)  # (row, logical block) -> block
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (row, source, destination)
    swap_out: list[Transfer] = field(default_factory=list)  # these two are never undone
    swap_in: list[Transfer] = field(default_factory=list)
    spills: list[Transfer] = field(default_factory=list)  # swapped out too; the device's copy stays cached

    @property
    def has_transfers(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.spills)


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks that hold a sequence's first tokens: on the device, and after those in host memory."""

    device: list[int]
    host: list[int]

    def __len__(self) -> int:
        return len(self.device) + len(self.host)

    def first(self, count: int) -> Found:
        return Found(self.device[:count], self.host[: max(0, count - len(self.device))])


class BlockManager:
    """Keeps the tables of sequences in rows backed by blocks (PagedAttention, sections 4.2 to 4.4).

    Logical block i of a sequence is table[i] and holds the keys and values of positions i * block_size
    onwards. A block is written only by the one table that names it, and never once it is full: full blocks
    become findable by content when the step that filled them was committed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        rows: Rows,
        hasher: BlockHasher | None,
        num_host_blocks: int = 0,
    ) -> None:
        self.cache = PrefixCache()
        self.pool = BlockPool(num_blocks, self.cache.forget)
        self.block_size = block_size
        self.host = HostTier(num_host_blocks) if num_host_blocks else None
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
        self._rows.capacity[sequence.row] = 0
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

    def match(self, sequence: Sequence) -> Found:
        """Blocks that hold the first tokens of `sequence`, as many as are findable."""
        found = Found([], [])
        if self._hasher is None:
            return found
        self._digest(self._hasher, sequence, len(sequence.tokens) // self.block_size)
        for digest, piece in zip(sequence.digests, self._hasher.pieces(sequence.tokens), strict=False):
            block = None if found.host else self.cache.find(digest, piece)
            if block is not None:
                found.device.append(block)
                continue
            block = None if self.host is None else self.host.cache.find(digest, piece)
            if block is None:
                break
            found.host.append(block)
        return found

    def attach(self, sequence: Sequence, found: Found) -> None:
        """Begin the table of `sequence`, which has none, with what `match` gave.

        What is in host memory is on its way from the next step on. Raises OutOfBlocks only if fewer blocks
        are available than `found` has outside active ones.
        """
        assert not sequence.table
        for block in found.device:
            self.pool.share(block)
        sequence.table = list(found.device)
        sequence.published = len(found.device)
        for block in found.host:
            sequence.table.append(self._bring(block))
        self._tell(sequence, 0)

    def publish(self, sequence: Sequence, num_blocks: int) -> None:
        """The first `num_blocks` of `sequence` are full and written: make them findable.

        A block whose content is findable elsewhere is given back and that one shared instead, unless forks
        share it: with both blocks in use the group would need more than it was let in for.
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
                if not self.cache.publish(digest, piece, block):
                    sequence.published = logical
                    return  # a collision: what comes after it would be taken for what comes after the other
                self.pool.keep(block)
            elif twin != block and self.pool.count(block) == 1:
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

    # -- the host tier ----------------------------------------------------------------------------------

    def swap_out(self, group: SequenceGroup) -> bool:
        """Copy a group's blocks to host memory, those it shares once; False if there is no room for them.

        Once the group's sequences are freed, their device blocks are in transfer until the step that carries
        them is committed.
        """
        for sequence in group.live:
            self._trim(sequence)
        distinct = {block for sequence in group.live for block in sequence.table}
        if self.host is None or len(distinct) > self.host.pool.num_available:
            return False
        placed: dict[int | Digest, int] = {}
        for sequence in group.live:
            sequence.host_published = sequence.published
            sequence.saved_context = int(self._rows.context[sequence.row])
            pieces = self._host_pieces(sequence)
            for logical, block in enumerate(sequence.table):
                # Two blocks with the same content come back as one.
                key = sequence.digests[logical] if logical < len(pieces) else block
                host_block = placed.get(block, placed.get(key))
                if host_block is None:
                    host_block = self._place(self.host, sequence, logical, pieces)
                else:
                    self.host.pool.share(host_block)
                placed[block] = placed[key] = host_block
                sequence.host_table.append(host_block)
        return True

    def _trim(self, sequence: Sequence) -> None:
        """Give back blocks that were taken for tokens that are not going to be computed now."""
        while len(sequence.table) > self.blocks_for(int(self._rows.context[sequence.row])):
            self.pool.release(sequence.table.pop())

    def _place(self, host: HostTier, sequence: Sequence, logical: int, pieces: list[bytes]) -> int:
        """A host block for logical block `logical`: one that holds the same, or a transfer to a new one."""
        if logical < len(pieces):
            twin = host.cache.find(sequence.digests[logical], pieces[logical])
            if twin is not None:
                host.pool.share(twin)
                return twin
        block = host.pool.allocate()
        self._start(self.moves.swap_out, host, Transfer(sequence.table[logical], block))
        return block

    def swap_in(self, group: SequenceGroup) -> None:
        """Bring a group back into rows that it has been given; usable once the step is committed.

        Raises OutOfBlocks only if fewer blocks are available than the group's distinct host blocks.
        """
        assert self.host is not None
        placed: dict[int, int] = {}
        for sequence in group.live:
            pieces = self._host_pieces(sequence)
            for logical, block in enumerate(sequence.host_table):
                if block in placed:
                    self.pool.share(placed[block])
                else:
                    twin = None
                    if logical < len(pieces):
                        twin = self.cache.find(sequence.digests[logical], pieces[logical])
                    if twin is not None:
                        self.pool.share(twin)
                    placed[block] = self._bring(block) if twin is None else twin
                sequence.table.append(placed[block])
            self.drop_host(sequence)
            self._rows.context[sequence.row] = sequence.saved_context
            self._tell(sequence, 0)

    def drop_host(self, sequence: Sequence) -> None:
        """Give back what `sequence` has in host memory, last block first."""
        while sequence.host_table:
            assert self.host is not None
            self.host.pool.release(sequence.host_table.pop())

    def spill(self, count: int) -> None:
        """Copy those of the next `count` blocks to be evicted to host memory that are not there yet."""
        if self.host is None or self._hasher is None:
            return
        # What is spilled must not push out what has just been: at most half of the room is looked after.
        for block in self.pool.next_to_evict(min(count, self.host.pool.num_available // 2)):
            digest, piece = self.cache.describe(block)
            twin = self.host.cache.find(digest, piece)
            if twin is not None:
                self.host.pool.refresh(twin)
                continue
            self._start(self.moves.spills, self.host, Transfer(block, self.host.pool.allocate()))

    def arrived(self, moves: Moves) -> None:
        """The step that carried `moves` is committed."""
        for _, source, _ in moves.copies:
            self.pool.unhold(source)
        if self.host is None:
            return
        for transfer in reversed((*moves.swap_out, *moves.swap_in)):  # children before parents
            self.pool.unhold(transfer.device)
            self.host.pool.unhold(transfer.host)
        for spill in moves.spills:
            self.host.publish(*self.cache.describe(spill.device), spill.host)
            self.host.pool.release(spill.host)
            self.host.pool.unhold(spill.host)
        for spill in reversed(moves.spills):  # so that the order of eviction stays as it was
            self.pool.unhold(spill.device, evict_next=True)

    def publish_on_host(self, group: SequenceGroup) -> None:
        """A swapped group's full blocks have arrived in host memory: others may find them there."""
        for sequence in group.live:
            pieces = self._host_pieces(sequence)
            for digest, piece, block in zip(sequence.digests, pieces, sequence.host_table, strict=False):
                if self.host is not None:
                    self.host.publish(digest, piece, block)

    def _host_pieces(self, sequence: Sequence) -> list[bytes]:
        """The tokens of the host blocks whose content is findable."""
        if self._hasher is None:
            return []
        return self._hasher.pieces(sequence.tokens[: sequence.host_published * self.block_size])

    def _bring(self, host_block: int) -> int:
        """A new device block that the next step fills from `host_block`."""
        assert self.host is not None
        block = self.pool.allocate()
        self._start(self.moves.swap_in, self.host, Transfer(block, host_block))
        return block

    def _start(self, moves: list[Transfer], host: HostTier, transfer: Transfer) -> None:
        self.pool.hold(transfer.device)
        host.pool.hold(transfer.host)
        moves.append(transfer)

    def check(self, sequences: Iterable[Sequence], under_way: Iterable[Moves]) -> None:
        """Assert every invariant, given all sequences there are and the moves of plans not yet committed."""
        sequences, moves = list(sequences), [*under_way, self.moves]
        transfers = [t for each in moves for t in (*each.swap_out, *each.swap_in, *each.spills)]
        sources = [source for each in moves for _, source, _ in each.copies]
        tables = [sequence.table for sequence in sequences]
        self.pool.check(tables, [*sources, *(transfer.device for transfer in transfers)])
        self.cache.check()
        for table in tables:
            assert len(set(table)) == len(table), f"a table names a block twice: {table}"
        assert len(self.cache) == sum(self.pool.is_kept(block) for block in range(self.pool.num_blocks))
        if self.host is not None:
            spilling = [[transfer.host] for each in moves for transfer in each.spills]
            host_tables = [sequence.host_table for sequence in sequences]
            self.host.pool.check([*host_tables, *spilling], [transfer.host for transfer in transfers])
            self.host.cache.check()
