"""Block tables of running sequences: growing, sharing, copying on write, publishing and freeing them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from functools import partial
from itertools import chain

from quire.engine.hashing import BlockHasher
from quire.engine.memory.cache_history import CacheHistory
from quire.engine.memory.contents import Contents
from quire.engine.memory.full_group import FullGroup
from quire.engine.memory.host_tier import HostTier
from quire.engine.memory.move_ring import MoveRing
from quire.engine.memory.moves import Moves
from quire.engine.memory.pinned_tails import PinnedTails
from quire.engine.memory.pool import BlockPool, OutOfBlocks
from quire.engine.memory.prefix_cache import Found
from quire.engine.memory.window_groups import WindowGroups
from quire.engine.sequences.rows import Index, Rows
from quire.engine.sequences.sequence import NO_ROW, Sequence, SequenceGroup


class BlockManager:
    """Keeps the tables of sequences in rows backed by blocks (PagedAttention, sections 4.2 to 4.4).

    Logical block i of a sequence holds the keys and values of positions i * block_size onwards. A block is
    written only by the one table that names it, and never once it is full.

    A full block can be found by content. From the plan in which a prefill fills it on it is `computing`: who
    shares it computes in that step or a later one, and each layer of a step with prefills writes the keys and
    values of all its tokens before any of them attends. It is forgotten if no table names it any more. Once
    a step of a table that names it was committed it is published: that outlives its tables, and the registry
    hears of it.

    Layers with windows are cache groups of their own, with tables of their own (`windows`), beside one that
    keeps all tokens or without. A logical block takes a block of each group, and a sequence can go on from
    where all groups have what it reads.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        rows: Rows,
        hasher: BlockHasher | None,
        num_host_blocks: int = 0,
        windows: Listed[int] = (),
        *,
        keeps_all: bool = True,
    ) -> None:
        """windows: how many of the last tokens each cache group keeps, but for one that keeps all."""
        self.ring = ring = MoveRing(num_blocks + num_host_blocks)
        self.pool = BlockPool(num_blocks, self._evicted, ring)
        self.tails = PinnedTails()
        self.full = FullGroup(block_size, self.pool, rows, self.tails, ring) if keeps_all else None
        first = int(keeps_all)  # number of the first group with a window
        self.windows = WindowGroups(windows, first, block_size, self.pool, rows, ring) if windows else None
        self._groups: list[FullGroup | WindowGroups] = []
        self._groups += [] if self.full is None else [self.full]
        self._groups += [] if self.windows is None else [self.windows]
        self.pages = sum(map(len, self._groups))  # blocks that a logical block takes
        self.caches = [cache for group in self._groups for cache in group.caches]  # the device's
        self.cache = self.caches[0]
        self.block_size = block_size
        self.host = HostTier(num_host_blocks, self.pool, self.caches, ring)
        self.history = CacheHistory(num_blocks + num_host_blocks)
        if hasher is not None:
            self.cache.exact_listeners.append(self.history.changed)
            self.host.cache.exact_listeners.append(self.history.changed)
        indices = self.cache, self.windows, self.host, self.tails
        self.contents = Contents(block_size, hasher, *indices, self.history, keeps_all=keeps_all)
        self.moves = Moves()
        self.copies_on_write = 0  # since start
        self._rows = rows

    @property
    def has_prefix_cache(self) -> bool:
        return self.contents.are_indexed

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _evicted(self, block: int) -> None:
        next(cache for cache in self.caches if block in cache).forget(block)

    def take_moves(self) -> Moves:
        """Return what has gathered for the next plan, and begin anew."""
        moves, self.moves = self.moves, Moves()
        return moves

    # -- growing and sharing ---------------------------------------------------------------------------

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Back `num_tokens` with blocks. Raises OutOfBlocks; what was added by then stays."""
        missing = self.blocks_for(num_tokens) - sequence.num_blocks
        if missing <= 0:
            return
        count = min(missing, self.pool.num_available // self.pages)
        blocks = self.pool.allocate_many(count * self.pages)
        for group in self._groups:
            group.grow(sequence, blocks[: count * len(group)], self.moves)
            del blocks[: count * len(group)]
        self._rows.capacity[sequence.row] = sequence.num_blocks * self.block_size
        if count < missing:
            raise OutOfBlocks

    def grow_all(self, rows: Index) -> None:
        """Add a block to the tables of each of these rows; as many must be available."""
        if self.full is None or self.windows is not None:
            for row in rows.tolist():
                sequence = self._rows.sequences[row]
                self.grow(sequence, (sequence.num_blocks + 1) * self.block_size)
            return
        self.full.grow_all(rows, self.pool.allocate_many(len(rows)), self.moves)
        self._rows.capacity[rows] += self.block_size

    def fork(self, parent: Sequence, child: Sequence, num_blocks: int | None = None) -> None:
        """Have `child` share the first `num_blocks` (all by default) of `parent`'s blocks, and no others."""
        end = parent.num_blocks if num_blocks is None else min(num_blocks, parent.num_blocks)
        self._take_over(parent, child, end)
        self._rows.capacity[child.row] = end * self.block_size
        for group in self._groups:
            group.fork(parent, child, end, self.moves)

    def follow_all(self, pairs: Listed[tuple[Sequence, Sequence]]) -> list[Sequence]:
        """Have each second one go on from where the first is: `fork`, but for a last block that is not full.

        What the parent has in that is copied to the child's own one, if it has one there that nobody else
        names or reads: shared, it would be copied all the same, to a block that had to be found first.
        Return the children that share it. Between two plans a sequence follows once at most, and none
        follows one that has.
        """
        rows, pending = self._rows, self.moves.copies
        parents = [parent.row for parent, _ in pairs]
        children = [child.row for _, child in pairs]
        assert pending.keys().isdisjoint(parents + children), "what is copied is not there yet"
        for parent, child in pairs:
            assert not child.group.transferring, "blocks are copied while they are on their way"
            child.num_found, child.published = parent.num_found, parent.published
            child.prefixes = parent.prefixes.copy()
        rows.capacity[children] = rows.capacity.take(parents)
        rows.context[children] = contexts = rows.context.take(parents)
        sharing: list[Sequence] = []
        for group in self._groups:
            copies, shared = group.follow_all(pairs, contexts.tolist(), self.moves)
            self.copies_on_write += copies
            sharing += shared
        return sharing

    def _take_over(self, parent: Sequence, child: Sequence, end: int) -> None:
        """Have `child` be as findable as `parent` is, up to logical block `end`: there its tables end."""
        child.num_found = min(parent.num_found, end)
        child.prefixes = parent.prefixes[:end]
        child.published = min(parent.published, end)

    def is_writable(self, sequence: Sequence, position: int) -> bool:
        """Return whether the block of `position` is this table's alone and not findable by others."""
        logical = position // self.block_size
        return all(group.is_writable(sequence, logical) for group in self._groups)

    def copy_on_write(self, sequence: Sequence, position: int) -> None:
        """Give `sequence` its own copy of the block of `position`. OutOfBlocks: nothing has changed.

        With windows that is of one group at a time: until `is_writable` there are others.
        """
        logical = position // self.block_size
        shared = next(group for group in self._groups if not group.is_writable(sequence, logical))
        shared.copy_on_write(sequence, logical, self.moves)
        self.copies_on_write += 1

    def free(self, sequence: Sequence) -> None:
        """Give every block back."""
        sequence.published = 0
        self._rows.capacity[sequence.row] = 0
        for group in self._groups:
            group.free(sequence, self.moves)

    def give_back_behind(self, sequence: Sequence, position: int) -> int:
        """Give back blocks behind the windows of tokens from `position` on, all that follow; return how many.

        The first of a group's sequences keeps what those need that have yet to begin behind its prompt.
        """
        if self.windows is None:
            return 0
        group = sequence.group
        if any(not other.num_blocks for other in group.prefill_queue):
            position = min(position, group.num_prompt // self.block_size * self.block_size)
        return self.windows.give_back_behind(sequence, position, self.moves)

    def reaches(self, sequence: Sequence, num_blocks: int) -> bool:
        """Return whether another could go on behind the first `num_blocks` of `sequence` by sharing them."""
        return self.windows is None or self.windows.reaches(sequence, num_blocks * self.block_size)

    # -- content ---------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> Found:
        """Return the blocks that hold the first tokens of `sequence`, as many as are findable."""
        return self.contents.match(sequence)

    def first_of(self, sequence: Sequence, found: Found, count: int) -> Found:
        """Return what `match` would find if it looked for at most `count` blocks of `sequence`."""
        return self.contents.first_of(sequence, found, count)

    def is_computing(self, found: Found) -> bool:
        """Return whether the last block of `found` may be one that is not written yet."""
        return bool(found.device) and not found.host and found.device[-1] in self.cache.computing

    def forget(self, sequence: Sequence) -> None:
        """Have nobody find what `sequence` has computed: it is worth nothing."""
        self.contents.forget(sequence, self.pool, self.caches)

    def attach(self, sequence: Sequence, found: Found) -> None:
        """Begin the tables of `sequence`, which has none, with what `match` gave.

        What is in host memory is on its way from the next step on. Raises OutOfBlocks only if fewer blocks
        are available than `found` has outside active ones.
        """
        assert not sequence.num_blocks
        # What is not written yet is this one's to publish if the one that computes it leaves.
        sequence.published = min([group.attach(sequence, found) for group in self._groups])
        sequence.num_found = min(sequence.num_found, sequence.published)
        for group in self._groups:
            group.bring(sequence, found, partial(self.host.bring, moves=self.moves))
        self.contents.drop(sequence)
        self._tell(sequence)

    def _tell(self, sequence: Sequence) -> None:
        """Send the device the whole tables of `sequence`."""
        self._rows.capacity[sequence.row] = sequence.num_blocks * self.block_size
        for group in self._groups:
            group.tell(sequence, self.moves)

    def mark_computing(self, sequence: Sequence, start: int, end: int) -> None:
        """Let others share the blocks that the next plan fills by prefilling tokens start..end-1."""
        if not self.has_prefix_cache:
            return
        begin, end = start // self.block_size, end // self.block_size
        prefixes = self.contents.extend(sequence, end)
        for group in self._groups:
            group.mark_computing(sequence, prefixes, begin, end, self.moves)

    def is_written(self, group: SequenceGroup) -> bool:
        """Return whether the blocks of `group` hold what they should before the next plan's step is done."""
        return self.moves.written.isdisjoint(chain(*(sequence.blocks for sequence in group.live)))

    def publish(self, filled: Iterable[tuple[Sequence, int]]) -> None:
        """Make the first blocks of each sequence, so many that are full and written, findable for good.

        A block whose content is findable elsewhere is given back and that one shared instead, unless forks
        share it: with both blocks in use the group would need more than it was let in for.
        """
        is_indexed = self.has_prefix_cache
        if not is_indexed and self.windows is None:
            return
        for sequence, num_blocks in filled:
            if sequence.row == NO_ROW:
                continue  # its blocks are gone
            if is_indexed:
                prefixes, end = self.contents.extend(sequence, num_blocks), num_blocks
                for group in self._groups:
                    end = group.publish(sequence, prefixes, sequence.published, end, self.moves)
                sequence.published = end
                if self.tails.num_wanted:
                    context = self._rows.context.item(sequence.row)
                    self.contents.keep_tail(sequence, context, self.pool)
            self.give_back_behind(sequence, num_blocks * self.block_size)

    # -- between the tiers ------------------------------------------------------------------------------

    def swap_out(self, group: SequenceGroup) -> bool:
        """Copy a group's blocks to host memory, those it shares once; False if there is no room for them."""
        for sequence in group.live:
            self._trim(sequence)
        swapped = self.host.swap_out(group.live, self.moves)
        for sequence in group.live if swapped else ():
            sequence.saved_context = int(self._rows.context[sequence.row])
        return swapped

    def _trim(self, sequence: Sequence) -> None:
        """Give back blocks that were taken for tokens that are not going to be computed now."""
        end = self.blocks_for(int(self._rows.context[sequence.row]))
        for group in self._groups:
            group.trim(sequence, end, self.moves)

    def swap_in(self, group: SequenceGroup) -> None:
        """Bring a group back into rows that it has been given; usable once the transfers are done.

        Raises OutOfBlocks only if fewer blocks are available than the group's distinct host blocks.
        """
        for sequence in group.live:
            self._rows.context[sequence.row] = sequence.saved_context
        self.host.swap_in(group, self.moves)
        for sequence in group.live:
            self._tell(sequence)

    def end(self, sequence: Sequence) -> None:
        """Let go of what `sequence`, which has ended and is in no row, still has here."""
        self.host.drop(sequence)
        self.contents.drop(sequence)

    def copied(self, moves: Moves) -> None:
        """Let go of the sources of `moves`' copies, whose step is committed."""
        for source, _ in moves.copies.values():
            self.pool.unhold(source)
        moves.copies.clear()
