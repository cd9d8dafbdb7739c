"""What a pool to play with looks like at a moment, as plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.engine.lab.paths import Call


class LabBlock(msgspec.Struct, frozen=True):
    """A device block: who names it, and how full it is."""

    state: Literal["free", "active", "cached"]
    references: int  # tables that name it
    tokens: int  # that it holds
    findable: bool  # by its content: it was published


class LabSequence(msgspec.Struct, frozen=True):
    """A sequence and its block table. Swapped out, it has host blocks instead."""

    id: int
    tokens: int
    block_table: list[int]
    host_table: list[int]
    parent: int | None  # whom it was forked from


class LabPool(msgspec.Struct, frozen=True):
    """All of a pool, after `operation`."""

    num_blocks: int
    block_size: int
    used: int  # device blocks that tables name
    cached: int  # published ones that no table names
    free: int
    host_used: int
    copies: int  # on write, since the beginning
    naive: int  # blocks that the sequences on the device would take if nothing were shared
    fragmentation: float  # the part of the used blocks' room that holds no token
    operation: str
    said: str  # what it did, or why it did nothing
    path: list[Call]  # the functions that did it
    blocks: list[LabBlock]
    sequences: list[LabSequence]
