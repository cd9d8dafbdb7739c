"""Blocks and tables as they were after any of the moves that are kept: back from now, and on again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec
import numpy as np

from quire.engine.inspection.messages import (
    ACTIVE,
    CACHED,
    COMPUTING,
    FREE,
    IN_TRANSFER,
    PINNED,
    ExactPool,
    PoolAnswer,
    Table,
)
from quire.engine.memory import move_kinds as kinds

KEPT, IS_COMPUTING, IS_PINNED = 1, 2, 4
# Which flag of a block each kind sets or clears.
_FLAGS = {
    kinds.KEEP: (KEPT, True),
    kinds.EVICT: (KEPT, False),
    kinds.DISCARD: (KEPT, False),
    kinds.COMPUTING: (IS_COMPUTING, True),
    kinds.COMPUTED: (IS_COMPUTING, False),
    kinds.PIN: (IS_PINNED, True),
}
_NAMES = (kinds.ALLOCATE, kinds.HIT, kinds.FORK)
Name = tuple[int, int]  # of a sequence: its request, and its index there


class Moved(msgspec.Struct, frozen=True):
    """What a `MoveRing` has noted."""

    kind: int
    place: int  # DEVICE or HOST, and KINDS times the number of the cache group
    request: int
    index: int
    logical: int
    blocks: list[int]


def read_moves(numbers: bytes) -> Iterator[Moved]:
    read = array("q", numbers).tolist()
    at = 0
    while at < len(read):
        head, count, request, index, logical = read[at : at + kinds.HEADER]
        at += kinds.HEADER
        kind = head % kinds.KINDS
        yield Moved(kind, head - kind, request, index, logical, read[at : at + count])
        at += count


class Replay:
    """The pool after some move. Places are numbered as in `PoolAnswer`: the host's after the device's."""

    def __init__(self, now: PoolAnswer, exact: ExactPool) -> None:
        self.num_blocks = now.num_blocks
        self.counts: list[int] = np.frombuffer(exact.counts, np.int32).tolist()
        self.holds: list[int] = np.frombuffer(exact.holds, np.int32).tolist()
        self.flags = bytearray(exact.flags)
        self.tables: dict[Name, dict[int, dict[int, int]]] = {}  # by place in `Moved`, by logical block
        for line in exact.lines:
            blocks: list[int] = np.frombuffer(line.blocks, np.int32).tolist()
            named = self.tables.setdefault((line.request, line.index), {})
            named[line.place] = dict(enumerate(blocks, line.logical))

    def undo(self, move: Moved) -> None:
        self._move(move, forward=False)

    def redo(self, move: Moved) -> None:
        self._move(move, forward=True)

    def first_place(self, move: Moved) -> int:
        """Return where block 0 of the tier of `move` is."""
        return self.num_blocks if move.place >= kinds.HOST else 0

    def _move(self, move: Moved, *, forward: bool) -> None:
        kind, first = move.kind, self.first_place(move)
        if kind in _NAMES or kind == kinds.RELEASE:
            self._name(move, first, (kind != kinds.RELEASE) == forward)
        elif kind in (kinds.HOLD, kinds.UNHOLD):
            step = 1 if (kind == kinds.HOLD) == forward else -1
            for block in move.blocks:
                self.holds[first + block] += step
        elif kind in _FLAGS:
            flag, is_set = _FLAGS[kind]
            for block in move.blocks:
                if is_set == forward:
                    self.flags[first + block] |= flag
                else:
                    self.flags[first + block] &= ~flag

    def _name(self, move: Moved, first: int, names: bool) -> None:
        """Have a table name blocks, or no longer."""
        step = 1 if names else -1
        for block in move.blocks:
            self.counts[first + block] += step
        if move.request == kinds.NOBODY:
            return
        name = move.request, move.index
        places = self.tables.setdefault(name, {})
        table = places.setdefault(move.place, {})
        for logical, block in enumerate(move.blocks, move.logical):
            if names:
                table[logical] = block
            else:
                table.pop(logical, None)
        if not table:
            del places[move.place]
            if not places:
                del self.tables[name]

    # -- how it is told ---------------------------------------------------------------------------------

    def state(self, place: int) -> int:
        flags = self.flags[place]
        if self.counts[place]:
            return COMPUTING if flags & IS_COMPUTING else ACTIVE
        if self.holds[place]:
            return IN_TRANSFER
        return PINNED if flags & IS_PINNED else CACHED if flags & KEPT else FREE

    def references(self, place: int) -> int:
        return min(self.counts[place], 255)

    def table(self, name: Name, salt: str) -> Table | None:
        """Return the table of a sequence; None: it has no blocks."""
        places = self.tables.get(name)
        if places is None:
            return None
        blocks: tuple[list[int], list[int]] = [], []
        for place in sorted(places):
            table = places[place]
            blocks[place >= kinds.HOST].extend(table[logical] for logical in sorted(table))
        device, host = (np.array(each, np.int32).tobytes() for each in blocks)
        return Table(*name, "running" if device else "swapped", None, device, host, salt)
