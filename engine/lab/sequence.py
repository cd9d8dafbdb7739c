"""A sequence of a pool to play with: it grows, forks, writes, is swapped, published and freed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from quire.engine.arrays import Int32, empty_int32
from quire.engine.lab.state import LabState, Member
from quire.engine.memory.pool import OutOfBlocks
from quire.engine.memory.prefix_cache import Found
from quire.engine.sequences.sequence import NO_ROW, Sequence


@dataclass(frozen=True, repr=False)
class PoolSequence:
    """Sequence `id` of a Pool. An operation that finds no block raises OutOfBlocks, and changes nothing."""

    _state: LabState
    id: int

    @property
    def num_tokens(self) -> int:
        return self._sequence.num_tokens

    @property
    def block_table(self) -> list[int]:
        """Return the device blocks that hold its tokens, in order; none while it is swapped out."""
        return list(self._sequence.table)

    @property
    def host_table(self) -> list[int]:
        """Return the host blocks that hold them while it is swapped out."""
        return list(self._sequence.host_table)

    @property
    def is_swapped_out(self) -> bool:
        return self._sequence.row == NO_ROW

    @property
    def parent(self) -> int | None:
        """Return the number of the sequence that it was forked from."""
        return self._member.parent

    def __repr__(self) -> str:
        if self.id not in self._state.members:
            return f"Sequence {self.id} (freed)"
        where = f"host blocks {self.host_table}" if self.is_swapped_out else f"blocks {self.block_table}"
        return f"Sequence {self.id} ({self.num_tokens} tokens in {where})"

    # -- operations ------------------------------------------------------------------------------------

    def append(self, n: int = 1) -> None:
        """Compute `n` more tokens. Those that begin a sequence are found, as far as they were published."""
        state, blocks = self._state, self._state.blocks
        with self._doing(f"append {n}") as sequence:
            if n < 1:
                raise ValueError(f"n must be at least 1, got {n}")
            start, end = sequence.num_tokens, sequence.num_tokens + n
            most = state.num_blocks * state.block_size
            if end > most:
                raise OutOfBlocks(f"{end} tokens are more than the {most} that all blocks together hold")
            tokens = np.append(sequence.tokens, state.said_by(self._member, start, end))
            found = Found([], []) if sequence.table else self._find(sequence, tokens)
            source = None
            if start % state.block_size and not blocks.is_writable(sequence, start):
                source = sequence.table[-1]
            wanted = blocks.blocks_for(end) - len(sequence.table) + (source is not None)
            try:
                self._check_room(wanted, list(found.device))
            except OutOfBlocks:
                if not sequence.table:
                    self._unfind(sequence)
                raise
            state.set_tokens(sequence, tokens)
            if len(found):
                blocks.attach(sequence, found)
            if source is not None:
                blocks.copy_on_write(sequence, start)
            held = len(sequence.table)
            blocks.grow(sequence, end)
            state.rows.context[sequence.row] = end
            state.said = self._appended(n, len(found), source, len(sequence.table) - held)

    def _find(self, sequence: Sequence, tokens: Int32) -> Found:
        """Return the published blocks that begin with `tokens`, all but the last of these."""
        self._state.set_tokens(sequence, tokens)
        found = self._state.blocks.match(sequence).first((len(tokens) - 1) // self._state.block_size)
        if not len(found):
            self._unfind(sequence)
        return found

    def _unfind(self, sequence: Sequence) -> None:
        self._state.set_tokens(sequence, empty_int32())
        sequence.prefixes = []

    def _appended(self, n: int, found: int, source: int | None, grown: int) -> str:
        said = f"Sequence {self.id} has {n} more token{'s' * (n > 1)}."
        if found:
            said += f" {found} full blocks were found by their content, and are not computed again."
        if source is not None:
            said += f" Block {source} is shared, so it was copied before the write."
        if grown:
            return f"{said} {grown} block{'s' * (grown > 1)} came from the free list."
        return f"{said} There was room in its last block."

    def fork(self) -> PoolSequence:
        """Begin a sequence that goes on from here, and shares all blocks."""
        state = self._state
        with self._doing("fork") as sequence:
            child = PoolSequence(state, state.begin(state.voice_of(None), self.id))
            state.set_tokens(child._sequence, sequence.tokens)
            state.blocks.fork(sequence, child._sequence)
            state.rows.context[child._sequence.row] = sequence.num_tokens
            state.said = (
                f"Sequence {child.id} names the {len(child.block_table)} blocks of sequence {self.id}: each "
                "is counted once more, and nothing is copied."
            )
        return child

    def write_last(self) -> None:
        """Write another last token: in place, or to a copy if others have its block or can find it."""
        state, blocks = self._state, self._state.blocks
        with self._doing("write to the last block") as sequence:
            last = sequence.num_tokens - 1
            if last < 0:
                raise ValueError(f"sequence {self.id} has no tokens, append some first")
            logical = last // state.block_size
            source = sequence.table[logical]
            if blocks.is_writable(sequence, last):
                state.said = f"Block {source} is sequence {self.id}'s alone: it is written in place."
            else:
                self._check_room(1, [])
                blocks.copy_on_write(sequence, last)
                state.said = (
                    f"Block {source} is named by others too, or can be found: sequence {self.id} writes to a "
                    f"copy, block {sequence.table[logical]}."
                )
            del sequence.prefixes[logical:]  # the block holds other tokens now
            sequence.published = min(sequence.published, logical)
            self._member.voice = state.voice_of(None)
            written = state.said_by(self._member, last, last + 1)
            state.set_tokens(sequence, np.append(sequence.tokens[:-1], written))

    def publish(self) -> None:
        """Make the full blocks findable: sequences that begin alike share them, and they outlive this one."""
        state = self._state
        with self._doing("publish") as sequence:
            before, full = self.block_table, sequence.num_tokens // state.block_size
            state.blocks.publish([(sequence, full)])
            merged = sum(old != new for old, new in zip(before, sequence.table, strict=True))
            state.said = f"{full} full blocks of sequence {self.id} can be found by their content."
            if merged:
                state.said += f" {merged} of them were there already: those are shared, its own given back."

    def swap_out(self) -> None:
        """Copy the blocks to host memory and give the device's back; shared ones stay for the others."""
        state, blocks = self._state, self._state.blocks
        with self._doing("swap out") as sequence:
            if not sequence.table:
                raise ValueError(f"sequence {self.id} has no blocks, append some tokens first")
            shared = sum(blocks.pool.count(block) > 1 for block in sequence.table)
            if not blocks.swap_out(sequence.group):
                raise OutOfBlocks(
                    f"it takes {len(sequence.table)} host blocks, and {blocks.host.pool.num_available} are "
                    "free or could be evicted"
                )
            blocks.free(sequence)
            state.rows.release(sequence)
            state.said = f"Sequence {self.id} has {len(sequence.host_table)} host blocks now."
            if shared:
                state.said += f" {shared} of its blocks stay on the device, for the others that share them."
        blocks.host.publish(sequence.group)  # they have arrived

    def swap_in(self) -> None:
        """Bring the blocks back to the device; those that are found there by their content are shared."""
        state, blocks = self._state, self._state.blocks
        with state.doing("swap in"):
            sequence = self._sequence
            if not self.is_swapped_out:
                raise ValueError(f"sequence {self.id} is on the device already")
            published = sequence.prefixes[: sequence.host_published]
            twins = [block for prefix in published if (block := blocks.cache.find(prefix)) is not None]
            self._check_room(len(sequence.host_table), twins)
            state.check_row()
            state.rows.assign(sequence)
            blocks.swap_in(sequence.group)
            state.said = f"Sequence {self.id} has {len(sequence.table)} device blocks again."
            if twins:
                state.said += f" {len(twins)} of them were found there by their content."

    def free(self) -> None:
        """End the sequence and give its blocks back; published ones stay cached."""
        state, blocks = self._state, self._state.blocks
        with state.doing("free"):
            sequence, used = self._sequence, blocks.pool.num_active
            if not self.is_swapped_out:
                blocks.free(sequence)
                state.rows.release(sequence)
            sequence.finish_reason = "abort"
            blocks.end(sequence)
            del state.members[self.id]
            given = used - blocks.pool.num_active
            state.said = f"Sequence {self.id} is gone: {given} blocks are no longer used."

    # -- inside ----------------------------------------------------------------------------------------

    @property
    def _member(self) -> Member:
        if self.id not in self._state.members:
            raise ValueError(f"sequence {self.id} was freed")
        return self._state.members[self.id]

    @property
    def _sequence(self) -> Sequence:
        return self._member.sequence

    @contextmanager
    def _doing(self, operation: str) -> Iterator[Sequence]:
        """Do what needs the sequence to be on the device."""
        with self._state.doing(operation):
            sequence = self._sequence
            if self.is_swapped_out:
                raise ValueError(f"sequence {self.id} is swapped out, swap it in first")
            yield sequence

    def _check_room(self, wanted: int, shared: list[int]) -> None:
        """Raise OutOfBlocks unless so many blocks can be had, with `shared` among them, which are there."""
        pool = self._state.blocks.pool
        missing = wanted - len(shared)
        available = pool.num_available - (pool.num_evictable(shared) if shared else 0)
        if missing > available:
            raise OutOfBlocks(f"it takes {missing} blocks, and {available} are free or could be evicted")
