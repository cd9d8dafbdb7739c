"""How the map of blocks changes, as pages hear of it: all of it once, and then what is different."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.inspection.messages import Move, PoolAnswer, RequestState, Table

UNKNOWN = -1.0  # age of a block that has not changed since somebody watches


class TableUpdate(msgspec.Struct):
    """A sequence, and its blocks from the `first` one on; those before are as they were."""

    request: int
    index: int
    state: RequestState
    key: str  # stands for the API key that it is of, as long as the process lives; empty without keys
    tokens: int | None  # None: not known, of a time when nobody watched
    first: int
    blocks: bytes  # int32 each, little-endian
    host_blocks: bytes


class BlockUpdate(msgspec.Struct, kw_only=True):
    """What is different since the update before, or all there is. Host blocks come after the device's."""

    full: bool
    at: float
    num_blocks: int
    num_host_blocks: int
    block_size: int
    places: bytes  # int32: which blocks are told of; empty: all of them
    states: bytes  # uint8
    references: bytes  # uint8
    ages: bytes  # float32: seconds since each changed, or UNKNOWN; only if full
    tables: list[TableUpdate]  # that are new or different
    gone: list[tuple[int, int]]  # requests, and sequences in them, that have no blocks any more
    waiting: int
    moves: list[Move]
    moves_lost: int  # that were too many to be told


class BlockHistory:
    """The last answer of the engine, when each block changed, and what was different."""

    def __init__(self, first: PoolAnswer, name_key: Callable[[str], str] = lambda salt: "") -> None:
        """name_key: what to call the key of a salt."""
        self.last = first
        self._name_key = name_key
        self._since: NDArray[np.float64] = np.full(len(first.states), np.nan)

    def full(self) -> BlockUpdate:
        last = self.last
        ages = np.nan_to_num(last.at - self._since, nan=UNKNOWN).astype(np.float32)
        return self._update(True, b"", last.states, last.references, ages.tobytes())

    def advance(self, answer: PoolAnswer, moves: list[Move] | None = None, lost: int = 0) -> BlockUpdate:
        """Take the next answer and the moves since the one before; return what is different."""
        last, self.last = self.last, answer
        before, now = _columns(last), _columns(answer)
        changed = np.flatnonzero((before != now).any(axis=0))
        self._since[changed] = answer.at
        states, references = now[:, changed]
        places = changed.astype(np.int32).tobytes()
        update = self._update(False, places, states.tobytes(), references.tobytes(), b"")
        known = {(table.request, table.index): table for table in last.tables}
        tables = [(known.pop((table.request, table.index), None), table) for table in answer.tables]
        update.tables = [self._table(table, old) for old, table in tables if table != old]
        update.gone = list(known)
        update.moves, update.moves_lost = moves or [], lost
        return update

    def _update(
        self, full: bool, places: bytes, states: bytes, references: bytes, ages: bytes
    ) -> BlockUpdate:
        last = self.last
        return BlockUpdate(
            full=full,
            at=last.at,
            num_blocks=last.num_blocks,
            num_host_blocks=last.num_host_blocks,
            block_size=last.block_size,
            places=places,
            states=states,
            references=references,
            ages=ages,
            tables=[self._table(table, None) for table in last.tables] if full else [],
            gone=[],
            waiting=last.num_waiting,
            moves=[],
            moves_lost=0,
        )

    def _table(self, table: Table, old: Table | None) -> TableUpdate:
        """Return what is new of a table: if it has only grown, its last blocks."""
        first = len(old.blocks) if old is not None and table.blocks.startswith(old.blocks) else 0
        return TableUpdate(
            request=table.request,
            index=table.index,
            state=table.state,
            key=self._name_key(table.salt),
            tokens=table.tokens,
            first=first // 4,
            blocks=table.blocks[first:],
            host_blocks=table.host_blocks,
        )


def _columns(answer: PoolAnswer) -> NDArray[np.uint8]:
    """Return states and references [2, blocks]."""
    both = np.frombuffer(answer.states + answer.references, np.uint8)
    return both.reshape(2, len(answer.states))
