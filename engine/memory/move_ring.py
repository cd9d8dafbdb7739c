"""The last moves of blocks, always written down, and read only when somebody asks.

What is noted here is all that changes a block's references and state, so whoever knows how blocks stand now
can go back. Moves are runs of numbers: what happens in each step costs its time, and no object stays.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Listed

from quire.engine.memory.move_kinds import HEADER, NOBODY, STEP
from quire.engine.sequences.sequence import Sequence

MAX_NUMBERS = 1 << 21
NUMBERS_PER_BLOCK = 1 << 11  # a small pool has less to tell
MAX_SECONDS = 600.0
CHUNK = 1 << 15
MAX_NEW = 1 << 12


class MoveRing:
    """Numbers in chunks, each of which begins with a step. A position counts those that are gone, too."""

    def __init__(self, num_blocks: int, max_numbers: int = MAX_NUMBERS) -> None:
        self._max_chunks = max(2, min(max_numbers, num_blocks * NUMBERS_PER_BLOCK) // CHUNK)
        self._chunks: deque[array[int]] = deque([array("q")])
        self._begin = 0  # position of the first number
        self._step = 0
        self._new = [STEP, 0, 0, 0, 0]  # the newest, from the beginning of a step on
        self._header = 0  # where in them this step begins

    def begin_step(self, now: float, num_waiting: int) -> None:
        """Have what comes next belong to another step, at `now` of a clock that never goes back."""
        self._step += 1
        if len(self._new) > MAX_NEW:
            self._flush()
        if len(self._new) == self._header + HEADER:  # steps without moves leave nothing
            del self._new[self._header :]
        self._header = len(self._new)
        self._new += (STEP, 0, self._step, num_waiting, int(now * 1e6))

    def note(self, kind: int, sequence: Sequence, logical: int, blocks: Listed[int]) -> None:
        """Note what a table of `sequence` does with `blocks`, which are its from `logical` on.

        What it no longer names there is noted first.
        """
        if not blocks:
            return
        new = self._new
        new += (kind, len(blocks), sequence.group.request.id, sequence.index, logical)
        new += blocks
        if len(new) > MAX_NEW:
            self._flush()

    def note_one(self, kind: int, sequence: Sequence, logical: int, block: int) -> None:
        """Do as `note` does, of one block: in a step of decodes that is all there is."""
        self._new += (kind, 1, sequence.group.request.id, sequence.index, logical, block)

    def mark(self, kind: int, block: int) -> None:
        """Note what happens to `block`, whoever names it."""
        self._new += (kind, 1, NOBODY, 0, 0, block)

    def mark_pair(self, kind: int, block: int, other: int) -> None:
        """Note what happens between two blocks."""
        self._new += (kind, 2, NOBODY, 0, 0, block, other)

    def flush(self) -> None:
        """Put the newest in their chunk, for which steps have no time: the step goes on."""
        if len(self._new) > HEADER:
            self._flush()

    def _flush(self) -> None:
        chunks, new, header = self._chunks, self._new, self._new[self._header :][:HEADER]
        if len(new) == self._header + HEADER:
            del new[self._header :]
        chunks[-1].fromlist(new)
        new[:], self._header = header, 0
        if len(chunks[-1]) >= CHUNK:
            chunks.append(array("q"))
            oldest = new[-1] - MAX_SECONDS * 1e6
            while len(chunks) > self._max_chunks or (len(chunks) > 2 and chunks[1][HEADER - 1] < oldest):
                self._begin += len(chunks.popleft())

    @property
    def position(self) -> int:
        """Return where the next moves begin."""
        self.flush()
        return self._begin + sum(map(len, self._chunks))

    def since(self, position: int) -> tuple[int, bytes]:
        """Return the numbers (int64) from `position` on, as far as they are kept, and where they begin."""
        begin = min(max(position, self._begin), self.position)
        parts, at = [], self._begin
        for chunk in self._chunks:
            parts.append(chunk[max(0, begin - at) :].tobytes())
            at += len(chunk)
        return begin, b"".join(parts)
