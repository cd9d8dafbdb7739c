"""What is asked about the engine's blocks, and what is answered: plain structs, array-encoded."""

from __future__ import annotations

from typing import Literal

import msgspec

FREE, ACTIVE, CACHED, COMPUTING, IN_TRANSFER, PINNED = range(6)
STATES = ("free", "active", "cached", "computing", "transfer", "pinned")
"""The state of a block, by its number. Pinned ones are cached for good."""

NO_MOVES = 1 << 62

Tier = Literal["device", "host"]
MoveKind = Literal["allocate", "hit", "fork", "release", "copy", "swap_out", "swap_in", "publish", "evict"]
RequestState = Literal["running", "waiting", "swapped"]


class PoolQuestion(msgspec.Struct, frozen=True, array_like=True, tag="pool"):
    """How does each block stand, and what has moved?"""

    since: int = 0  # the `end` of the answer before; 0: all moves that are kept; NO_MOVES: none
    exact: bool = False  # tell all that is needed to undo the moves, too


class BlockQuestion(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """What is in one block, and whose is it?"""

    block: int
    tier: Tier
    tenant: str  # who may read tokens of salts that begin with it


class PrefixQuestion(msgspec.Struct, frozen=True, array_like=True, tag="prefixes"):
    """Which texts are in the cache?"""


class OwnQuestion(msgspec.Struct, frozen=True, array_like=True, tag="own"):
    """In how many blocks are the tokens of these requests?"""

    requests: list[int]


class Move(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a block in a step, and how blocks stand after it."""

    step: int  # since the engine started
    at: float  # time.time(), seconds
    kind: MoveKind
    block: int  # on the device
    other: int  # the source of a copy, the host block of a swap; else -1
    request: int  # -1: nobody's
    effects: list[int] = []  # of each place that is different: the place, its state, its references


class Table(msgspec.Struct, array_like=True):
    """A sequence and its blocks."""

    request: int
    index: int  # of the sequence in its request
    state: RequestState
    tokens: int | None  # None: not known, of a time when nobody watched
    blocks: bytes  # int32 each, in order: of the first cache group, then of the others
    host_blocks: bytes
    salt: str = ""  # of its tenant, as far as it is the server's own


class TableLine(msgspec.Struct, array_like=True):
    """Blocks that follow each other in one table of a sequence."""

    request: int
    index: int
    place: int  # whose table it is: as in `memory.move_kinds`
    logical: int  # of the first
    blocks: bytes  # int32 each


class ExactPool(msgspec.Struct, array_like=True):
    """All that moves change. Blocks of the device, and after them those in host memory."""

    counts: bytes  # int32 each: tables that name it
    holds: bytes  # int32 each: transfers that need it
    flags: bytes  # uint8 each: KEPT, IS_COMPUTING, IS_PINNED of `inspection.replay`
    lines: list[TableLine]


class PoolAnswer(msgspec.Struct, array_like=True, tag="pool"):
    """All blocks: those of the device, and after them those in host memory."""

    at: float  # time.time(), seconds
    seconds: float  # that it took
    num_blocks: int
    num_host_blocks: int
    block_size: int
    states: bytes  # uint8 each
    references: bytes  # uint8 each; 255: so many or more
    tables: list[Table]
    num_waiting: int  # requests that wait, but for those that are swapped out
    moves: bytes = b""  # int64 each, as `memory.move_kinds` has them
    begin: int = 0  # position of the first: later than was asked for, if those are not kept
    clock: float = 0.0  # at `at`, of the clock that moves go by
    exact: ExactPool | None = None

    @property
    def end(self) -> int:
        """Return where the next moves begin."""
        return self.begin + len(self.moves) // 8


class Holder(msgspec.Struct, array_like=True):
    """A sequence whose table names a block, as its `logical` one."""

    request: int
    index: int
    logical: int


class BlockAnswer(msgspec.Struct, array_like=True, tag="block"):
    """One block."""

    state: int
    references: int
    holders: list[Holder]
    position: int | None = None  # of its first token in its sequence
    tokens: list[int] | None = None  # None: none are known, or they are another tenant's
    digest: str = ""  # of what it holds, if anything is known


class PrefixNode(msgspec.Struct, array_like=True):
    """A run of cached blocks that all who have the last of them share."""

    parent: int  # its place in the list; -1: a text begins here
    blocks: bytes  # int32 each: the run, in order
    active: int  # of them, named by tables
    pinned: bool
    hits: int  # requests that found the first block, since somebody watches
    evictions: int  # of blocks that came right after one of these, likewise
    digest: str  # of the last


class PrefixAnswer(msgspec.Struct, array_like=True, tag="prefixes"):
    """The cache's texts as a tree, parents before children; the largest, when there are too many."""

    seconds: float  # that it took
    nodes: list[PrefixNode]
    num_left_out: int
    hits: int
    evictions: int


class OwnAnswer(msgspec.Struct, array_like=True, tag="own"):
    """Different blocks of some requests, together."""

    active: int  # on the device, in use
    shared: int  # of those, named by several sequences, or by other requests only
    cached: int  # on the device, kept for whoever begins alike
    host: int  # in host memory, swapped out
    partial: bool = False  # there are more, which were not looked at


Question = PoolQuestion | BlockQuestion | PrefixQuestion | OwnQuestion
Answer = PoolAnswer | BlockAnswer | PrefixAnswer | OwnAnswer
