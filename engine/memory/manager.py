"""Block tables of running sequences: growing, sharing, copying on write, publishing and freeing them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest

from quire.engine.arrays import as_int32
from quire.engine.hashing import BlockHasher, Prefix, Prefixes
from quire.engine.memory.cache_history import CacheHistory
from quire.engine.memory.host_tier import HostTier
from quire.engine.memory.move_kinds import ALLOCATE, COPY, FORK, HIT, RELEASE
from quire.engine.memory.move_ring import MoveRing
from quire.engine.memory.moves import Moves
from quire.engine.memory.pinned_tails import PinnedTails
from quire.engine.memory.pool import BlockPool, OutOfBlocks
from quire.engine.memory.prefix_cache import Found, Match, PrefixCache
from quire.engine.memory.window_groups import WindowGroups
from quire.engine.records import Miss
from quire.engine.sequences.rows import Index, Rows
from quire.engine.sequences.sequence import NO_ROW, BlockTable, Sequence, SequenceGroup
from quire.engine.sequences.window_table import WindowTable


class BlockManager:
    """Keeps the tables of sequences in rows backed by blocks (PagedAttention, sections 4.2 to 4.4).

    Logical block i of a sequence is table[i] and holds the keys and values of positions i * block_size
    onwards. A block is written only by the one table that names it, and never once it is full.

    A full block can be found by content. From the plan in which a prefill fills it on it is `computing`: who
    shares it computes in that step or a later one, and each layer of a step with prefills writes the keys and
    values of all its tokens before any of them attends. It is forgotten if no table names it any more. Once
    a step of a table that names it was committed it is published: that outlives its tables, and the registry
    hears of it.

    Layers with windows may be cache groups of their own, with tables of their own (`windows`). A logical
    block then takes a block of each group, and a sequence can go on from where all groups have what it reads.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        rows: Rows,
        hasher: BlockHasher | None,
        num_host_blocks: int = 0,
        windows: Listed[int] = (),
    ) -> None:
        """windows: how many of the last tokens each cache group after the first keeps."""
        self.ring = ring = MoveRing(num_blocks + num_host_blocks)
        self.cache = PrefixCache(num_blocks, ring)
        self.pool = BlockPool(num_blocks, self._evicted if windows else self.cache.forget, ring)
        self.windows = WindowGroups(windows, block_size, self.pool, rows, ring) if windows else None
        self.pages = 1 + len(windows)  # blocks that a logical block takes
        self.block_size = block_size
        self.tails = PinnedTails()
        self.host = HostTier(num_host_blocks, self.pool, self.caches, ring)
        self.history = CacheHistory(num_blocks + num_host_blocks)
        if hasher is not None:
            self.cache.listeners.append(self.history.changed)
            self.host.cache.listeners.append(self.history.changed)
        self.moves = Moves()
        self.copies_on_write = 0  # since start
        self._prefixes = None if hasher is None else Prefixes(hasher)
        self._matches: dict[Sequence, Match] = {}  # of sequences that wait
        self._rows = rows

    @property
    def has_prefix_cache(self) -> bool:
        return self._prefixes is not None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def caches(self) -> list[PrefixCache]:
        """The device's, of each cache group."""
        return [self.cache] if self.windows is None else [self.cache, *self.windows.caches]

    def _evicted(self, block: int) -> None:
        next(cache for cache in self.caches if block in cache).forget(block)

    def take_moves(self) -> Moves:
        """Return what has gathered for the next plan, and begin anew."""
        moves, self.moves = self.moves, Moves()
        return moves

    # -- growing and sharing ---------------------------------------------------------------------------

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Back `num_tokens` with blocks. Raises OutOfBlocks; what was added by then stays."""
        table, row = sequence.table, sequence.row
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return
        count = min(missing, self.pool.num_available // self.pages)
        blocks = self.pool.allocate_many(count * self.pages)
        if self.windows is not None:
            blocks, others = blocks[:count], blocks[count:]
            self.windows.grow(sequence, others, self.moves)
        self.moves.enter(row, len(table), blocks)
        self.ring.note(ALLOCATE, sequence, len(table), blocks)
        table += blocks
        self._rows.capacity[row] = len(table) * self.block_size
        if count < missing:
            raise OutOfBlocks

    def grow_all(self, rows: Index) -> None:
        """Add a block to the tables of each of these rows; as many must be available."""
        entries, sequences, note = self.moves.entries, self._rows.sequences, self.ring.note_one
        if self.windows is not None:
            for row in rows.tolist():
                self.grow(sequences[row], (len(sequences[row].table) + 1) * self.block_size)
            return
        for row, block in zip(rows.tolist(), self.pool.allocate_many(len(rows)), strict=True):
            table = sequences[row].table
            entries[row, len(table)] = block
            note(ALLOCATE, sequences[row], len(table), block)
            table.append(block)
        self._rows.capacity[rows] += self.block_size

    def fork(self, parent: Sequence, child: Sequence, num_blocks: int | None = None) -> None:
        """Have `child` share the first `num_blocks` (all by default) of `parent`'s blocks, and no others."""
        self._take_over(parent, child, parent.table[:num_blocks])
        if self.windows is not None:
            self.windows.fork(parent, child, len(child.table), self.moves)

    def follow(self, parent: Sequence, child: Sequence) -> bool:
        """Have `child` go on from where `parent` is: `fork`, but for a last block that is not full.

        What `parent` has in that is copied to the child's own one, if it has one there that nobody else
        names or reads: shared, it would be copied all the same, to a block that had to be found first.
        Return whether it is shared. Between two plans a sequence follows once at most, and none follows one
        that has.
        """
        pending = self.moves.copies
        assert parent.row not in pending and child.row not in pending, "what is copied is not there yet"
        assert not child.group.transferring, "blocks are copied while they are on their way"
        position = self._rows.context.item(parent.row)
        logical = position // self.block_size
        table = parent.table.copy()
        begun = position % self.block_size > 0
        copied = (
            begun
            and logical < len(child.table)
            and self.is_writable(child, position)
            and not self.pool.is_held(child.table[logical])
        )
        if copied:
            table[logical] = child.table[logical]
        self._take_over(parent, child, table)
        if copied:
            self._copy(child.row, parent.table[logical], table[logical])
        if self.windows is not None:
            copies = self.windows.follow(parent, child, position, self.moves)
            self.copies_on_write += copies or 0
            if copies is None:
                return True
        return begun and not copied

    def _take_over(self, parent: Sequence, child: Sequence, table: BlockTable) -> None:
        """Have `child` name the blocks of `table`, which hold what those of `parent` do, instead of its own.

        Those that it names already stay untouched: of beams that is nearly all, at each step.
        """
        child.num_found = min(parent.num_found, len(table))
        child.prefixes = parent.prefixes[: len(table)]
        child.published = min(parent.published, len(table))
        if table == child.table:
            return
        before, child.table = child.table, table
        given_back: list[int] = []
        for logical, (old, new) in enumerate(zip_longest(before, child.table)):
            if old == new:
                continue
            if old is not None:
                self.ring.note_one(RELEASE, child, logical, old)
            if new is None:
                self.moves.entries.pop((child.row, logical), None)
            else:
                self.pool.share(new)
                self.ring.note_one(FORK, child, logical, new)
                self.moves.entries[child.row, logical] = new
            if old is not None:
                given_back.append(old)
        self._rows.capacity[child.row] = len(child.table) * self.block_size
        if given_back:
            self.moves.release(given_back, self.pool, self.cache)
            self.moves.undo_copy(child.row, self.pool)

    def is_writable(self, sequence: Sequence, position: int) -> bool:
        """Return whether the block of `position` is this table's alone and not findable by others."""
        logical = position // self.block_size
        if not self._is_own(sequence.table[logical]):
            return False
        return self.windows is None or self.windows.is_writable(sequence, logical)

    def _is_own(self, block: int) -> bool:
        return self.pool.count(block) == 1 and block not in self.tails and block not in self.cache

    def copy_on_write(self, sequence: Sequence, position: int) -> None:
        """Give `sequence` its own copy of the block of `position`. OutOfBlocks: nothing has changed.

        With windows that is of one group at a time: until `is_writable` there are others.
        """
        logical = position // self.block_size
        source = sequence.table[logical]
        if self.windows is not None and self._is_own(source):
            self.windows.copy_on_write(sequence, logical, self.moves)
            self.copies_on_write += 1  # of another group
            return
        destination = self.pool.allocate()
        self._copy(sequence.row, source, destination)
        self.moves.release([source], self.pool, self.cache)
        self.ring.note_one(RELEASE, sequence, logical, source)
        self.ring.note_one(ALLOCATE, sequence, logical, destination)
        sequence.table[logical] = destination
        self.moves.entries[sequence.row, logical] = destination

    def _copy(self, row: int, source: int, destination: int) -> None:
        """Have the next plan copy `source` to `destination`, which the table of `row` names."""
        assert source not in self.moves.written, "a copy is made before the step writes its source"
        assert row not in self.moves.copies, "a row has two copies in one plan"
        self.pool.hold(source)  # nobody may get it before the copy was made
        self.ring.note(COPY, self._rows.sequences[row], 0, (destination, source))
        self.moves.copies[row] = source, destination
        self.copies_on_write += 1

    def free(self, sequence: Sequence) -> None:
        """Give every block back."""
        table, sequence.table = sequence.table, []
        self.ring.note(RELEASE, sequence, 0, table)
        self.moves.release(table, self.pool, self.cache)
        sequence.published = 0
        self._rows.capacity[sequence.row] = 0
        self.moves.leave(sequence.row, 0, len(table))
        self.moves.undo_copy(sequence.row, self.pool)
        if self.windows is not None:
            self.windows.free(sequence, self.moves)

    def give_back_behind(self, sequence: Sequence, position: int) -> int:
        """Give back blocks behind the windows of tokens from `position` on, all that follow; return how many.

        The first of a group's sequences keeps what those need that have yet to begin behind its prompt.
        """
        if self.windows is None:
            return 0
        group = sequence.group
        if any(not other.table for other in group.prefill_queue):
            position = min(position, group.num_prompt // self.block_size * self.block_size)
        return self.windows.give_back_behind(sequence, position, self.moves)

    def _tell(self, sequence: Sequence) -> None:
        """Send the device the whole table of `sequence`."""
        self.moves.enter(sequence.row, 0, sequence.table)
        self._rows.capacity[sequence.row] = len(sequence.table) * self.block_size
        if self.windows is not None:
            self.windows.tell(sequence, self.moves)

    # -- content ---------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> Found:
        """Return the blocks that hold the first tokens of `sequence`, as many as are findable.

        They are remembered until they are attached, for the next time.
        """
        prefixes = self._extend(sequence, sequence.num_tokens // self.block_size)
        match = self._matches.get(sequence)
        if match is None or match.prefixes is not prefixes:
            match = self._matches[sequence] = Match(prefixes, self.cache, self.host.cache)
        found = match.renew()
        if self.windows is None:
            return found
        return self.first_of(sequence, found, (sequence.num_tokens - 1) // self.block_size)

    def first_of(self, sequence: Sequence, found: Found, count: int) -> Found:
        """Return what `match` would find if it looked for at most `count` blocks of `sequence`.

        Behind a window there may be fewer: a sequence goes on only from where each group has what it reads.
        """
        if self.windows is None:
            return found.first(count)
        host_caches = self.host.caches[1:] if self.host.pool.num_blocks else ()
        end, windows = self.windows.match(sequence.prefixes, min(count, len(found)), host_caches)
        return replace(found.first(end), windows=windows)

    def first_on_device(self, sequence: Sequence, found: Found, count: int) -> Found:
        """Return the same of the device alone."""
        most = min(count, len(found.device))
        if self.windows is None:
            return found.first(most)
        end, windows = self.windows.match(sequence.prefixes, most)
        return replace(found.first(end), windows=windows)

    def reaches(self, sequence: Sequence, num_blocks: int) -> bool:
        """Return whether another could go on behind the first `num_blocks` of `sequence` by sharing them."""
        return self.windows is None or self.windows.reaches(sequence, num_blocks * self.block_size)

    def explain_miss(self, sequence: Sequence, found: int) -> Miss:
        """Say why the `found`-th block of `sequence`, for which they were matched, was not found."""
        prefixes, owner = sequence.prefixes, sequence.group.request.owner
        caches = [self.cache] if self.windows is None else [self.cache, self.host.cache]
        if found < len(prefixes) and any(cache.find(prefixes[found]) is not None for cache in caches):
            if self.windows is not None and (found + 1) * self.block_size < sequence.num_tokens:
                return Miss("behind_window", found * self.block_size)
            return Miss("last_token", found * self.block_size)
        return self.history.explain(prefixes, found, self.block_size, owner)

    def with_tail(self, sequence: Sequence, found: Found) -> Found:
        """Return `found`, and a pinned block that begins with what comes next, all but the last token."""
        if not len(self.tails) or found.host:
            return found
        num_blocks = len(found.device)
        before = sequence.prefixes[num_blocks - 1] if num_blocks else None
        rest = sequence.tokens[num_blocks * self.block_size : -1]
        return replace(found, tail=self.tails.find(before, rest))

    def is_computing(self, found: Found) -> bool:
        """Return whether the last block of `found` may be one that is not written yet."""
        return bool(found.device) and not found.host and found.device[-1] in self.cache.computing

    def attach(self, sequence: Sequence, found: Found) -> None:
        """Begin the table of `sequence`, which has none, with what `match` gave.

        What is in host memory is on its way from the next step on. Raises OutOfBlocks only if fewer blocks
        are available than `found` has outside active ones.
        """
        assert not sequence.table
        for block in found.device:
            self.pool.share(block)
        sequence.table = list(found.device)
        # What is not written yet is this one's to publish if the one that computes it leaves.
        computing = (i for i, block in enumerate(found.device) if block in self.cache.computing)
        sequence.published = next(computing, len(found.device))
        sequence.num_found = min(sequence.num_found, sequence.published)
        written = sequence.published
        self.ring.note(HIT, sequence, 0, found.device[:written])
        self.ring.note(FORK, sequence, written, found.device[written:])
        if self.windows is not None:
            first = self.windows.attach(sequence, found.windows, len(found))
            sequence.published = min(sequence.published, first)
            sequence.num_found = min(sequence.num_found, first)
        for block in found.host:
            sequence.table.append(self.host.bring(block, self.moves))
        self.ring.note(ALLOCATE, sequence, len(found.device), sequence.table[len(found.device) :])
        if self.windows is not None:
            self.windows.bring(sequence, found.windows, partial(self.host.bring, moves=self.moves))
        if found.tail is not None:
            self.pool.share(found.tail.block)
            self.ring.note(HIT, sequence, len(sequence.table), (found.tail.block,))
            sequence.table.append(found.tail.block)
        self._matches.pop(sequence, None)
        self._tell(sequence)

    def mark_computing(self, sequence: Sequence, start: int, end: int) -> None:
        """Let others share the blocks that the next plan fills by prefilling tokens start..end-1."""
        if self._prefixes is None:
            return
        filled = slice(start // self.block_size, end // self.block_size)
        blocks = sequence.table[filled]
        self.cache.mark_computing(self._extend(sequence, filled.stop)[filled], blocks)
        self.moves.written.update(blocks)
        if self.windows is not None:
            prefixes = sequence.prefixes
            self.windows.mark_computing(sequence, prefixes, filled.start, filled.stop, self.moves)

    def is_written(self, group: SequenceGroup) -> bool:
        """Return whether the blocks of `group` hold what they should before the next plan's step is done."""
        return self.moves.written.isdisjoint(chain(*(sequence.blocks for sequence in group.live)))

    def publish(self, filled: Iterable[tuple[Sequence, int]]) -> None:
        """Make the first blocks of each sequence, so many that are full and written, findable for good.

        A block whose content is findable elsewhere is given back and that one shared instead, unless forks
        share it: with both blocks in use the group would need more than it was let in for.
        """
        if self._prefixes is None and self.windows is None:
            return
        pool, publish = self.pool, self.cache.publish
        for sequence, num_blocks in filled:
            if sequence.row == NO_ROW:
                continue  # its blocks are gone
            if self._prefixes is None:
                self.give_back_behind(sequence, num_blocks * self.block_size)
                continue
            table, prefixes, logical = sequence.table, self._extend(sequence, num_blocks), sequence.published
            while logical < num_blocks:
                block = table[logical]
                found = publish(prefixes[logical], block)
                if found == block:
                    pool.keep(block)
                elif found is None:
                    break  # a collision: what comes after it would not be found
                elif pool.count(block) == 1:
                    pool.share(found)
                    pool.release(block)
                    self.ring.note_one(RELEASE, sequence, logical, block)
                    self.ring.note_one(FORK, sequence, logical, found)
                    table[logical] = found
                    self.moves.entries[sequence.row, logical] = found
                logical += 1
            if self.windows is not None:
                self.windows.publish(sequence, prefixes, sequence.published, logical, self.moves)
                self.give_back_behind(sequence, num_blocks * self.block_size)
            sequence.published = logical
            if self.tails.num_wanted:
                self._keep_tail(sequence)

    def _keep_tail(self, sequence: Sequence) -> None:
        """Keep the last block of `sequence` if it holds the tail that was asked for, and nothing else."""
        full = sequence.num_tokens // self.block_size
        if len(sequence.table) > full and self._rows.context.item(sequence.row) == sequence.num_tokens:
            before = self._extend(sequence, full)[full - 1] if full else None
            block = sequence.table[full]
            if self.tails.keep(before, sequence.tokens[full * self.block_size :], block):
                self.pool.keep(block)

    def forget(self, sequence: Sequence) -> None:
        """Have nobody find what `sequence` has computed: it is worth nothing.

        Whoever shares some of it already goes on: a NaN among keys or values becomes one in its own logits.
        """
        for prefix in self._extend(sequence, sequence.num_tokens // self.block_size)[sequence.num_found :]:
            for cache in self.caches:
                _discard(cache, self.pool, prefix)
            for cache in self.host.caches:
                _discard(cache, self.host.pool, prefix)

    def open_to_all(self, tokens: list[int]) -> list[Prefix]:
        """Let all tenants find the blocks of `tokens` once they are computed; return the full ones' prefixes.

        What is left of the tokens is found behind these. Raises ValueError without a prefix cache.
        """
        if self._prefixes is None:
            raise ValueError(
                "--pin-prefix needs the prefix cache: leave out --no-enable-prefix-caching (a model that "
                "pools all tokens of a prompt has none)"
            )
        prefixes = self._prefixes.make_public(tokens)
        rest = as_int32(tokens[len(prefixes) * self.block_size :])
        if len(rest) and self.windows is None:  # a tail is one block
            self.tails.want(prefixes[-1] if prefixes else None, rest)
        return prefixes

    def pinned_blocks(self, prefixes: list[Prefix]) -> list[int]:
        """Return the blocks that a sequence needs which begins with all of `prefixes`, just computed."""
        blocks = [block for prefix in prefixes if (block := self.cache.find(prefix)) is not None]
        assert len(blocks) == len(prefixes), "a prefix is pinned before it was computed"
        if self.windows is not None:
            end, found = self.windows.match(prefixes, len(prefixes))
            assert end == len(prefixes), "a prefix is pinned whose window was evicted"
            blocks += chain.from_iterable(each.blocks for each in found)
        return blocks

    def _extend(self, sequence: Sequence, num_blocks: int) -> list[Prefix]:
        """Return the prefixes of `sequence`, its first `num_blocks` at least; none without a prefix cache."""
        prefixes = sequence.prefixes
        if self._prefixes is not None and len(prefixes) < num_blocks:
            contents = sequence.block_contents(self.block_size, len(prefixes), num_blocks)
            self._prefixes.extend(prefixes, contents, sequence.salt)
        return prefixes

    # -- between the tiers ------------------------------------------------------------------------------

    def swap_out(self, group: SequenceGroup) -> bool:
        """Copy a group's blocks to host memory, those it shares once; False if there is no room for them."""
        for sequence in group.live:
            self._trim(sequence)
        # A copy that the next plan would have made is not going to be: its source is what holds the tokens.
        sources = {destination: source for source, destination in self.moves.copies.values()}
        tables = {sequence: [sources.get(b, b) for b in sequence.table] for sequence in group.live}
        windows = {
            sequence: [
                WindowTable(table.first, [sources.get(b, b) for b in table.blocks])
                for table in sequence.window_tables
            ]
            for sequence in group.live
        }
        if not self.host.swap_out(tables, self.moves, windows):
            return False
        for sequence in group.live:
            sequence.saved_context = int(self._rows.context[sequence.row])
        return True

    def _trim(self, sequence: Sequence) -> None:
        """Give back blocks that were taken for tokens that are not going to be computed now."""
        while len(sequence.table) > self.blocks_for(int(self._rows.context[sequence.row])):
            block = sequence.table.pop()
            self.pool.release(block)
            self.ring.note(RELEASE, sequence, len(sequence.table), (block,))
            self.moves.entries.pop((sequence.row, len(sequence.table)), None)
        if self.windows is not None:
            self.windows.trim(sequence, len(sequence.table), self.moves)

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
        self._matches.pop(sequence, None)

    def copied(self, moves: Moves) -> None:
        """Let go of the sources of `moves`' copies, whose step is committed."""
        for source, _ in moves.copies.values():
            self.pool.unhold(source)
        moves.copies.clear()


def _discard(cache: PrefixCache, pool: BlockPool, prefix: Prefix) -> None:
    block = cache.find(prefix)
    if block is not None and not pool.is_pinned(block):
        if block not in cache.computing:
            pool.discard(block)
        cache.forget(block)
