"""What the API says of blocks."""

from __future__ import annotations

from typing import Literal

import msgspec


class HolderReply(msgspec.Struct):
    """A sequence whose table names the block."""

    request: int  # its number in the engine, as logs have it
    index: int  # which of the request's sequences
    logical: int  # the block's place in its table


class BlockReply(msgspec.Struct, kw_only=True):
    """One block. `tokens` and `text` are for the key that they are of, and null for all others."""

    tier: Literal["device", "host"]
    block: int
    state: str
    references: int
    holders: list[HolderReply]
    position: int | None = None  # of its first token in its sequence, from 0
    digest: str | None = None  # of what it holds
    tokens: list[int] | None = None
    text: str | None = None


class OwnBlocksReply(msgspec.Struct):
    """How many different blocks some requests of this key have together, on the device but for `host`."""

    active: int  # in use
    shared: int  # of those, named by several sequences, or by other requests only
    cached: int  # kept for prompts that begin alike
    host: int  # in host memory, swapped out
    partial: bool  # the requests have more blocks than are looked at for one answer


class PrefixRun(msgspec.Struct):
    """Blocks that follow each other in the cache, with nothing that branches off between them."""

    parent: int | None  # the run that it comes after, by its place in `runs`
    blocks: bytes  # int32 each, little-endian: the run, in order
    active: int  # of them, in use
    pinned: bool
    hits: int  # requests that found the first one, while somebody watched
    evictions: int  # of what came right after one of them, likewise
    digest: str


class PrefixTree(msgspec.Struct):
    """The texts in the cache."""

    block_size: int
    hits: int
    evictions: int
    left_out: int  # runs, the smallest ones
    runs: list[PrefixRun]
