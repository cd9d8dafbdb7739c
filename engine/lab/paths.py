"""The functions of the block manager that an operation ran, by name, with what each is for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

_MEMORY = str(Path(__file__).resolve().parents[1] / "memory")

PURPOSES = {
    "BlockManager.match": "looks the tokens' full blocks up by content",
    "BlockManager.attach": "begins the table with the blocks that were found",
    "BlockManager.grow": "backs tokens that have no block yet",
    "BlockPool.allocate_many": "takes blocks from the free list, and evicts cached ones when it is empty",
    "BlockPool._evict": "takes the block that was cached first, whose content is forgotten",
    "BlockManager.is_writable": "asks whether this table alone names the block, and nobody can find it",
    "BlockManager.copy_on_write": "gives the sequence a copy of its own, and drops the shared block",
    "BlockManager.fork": "names the parent's blocks in another table: nothing is copied",
    "BlockPool.share": "counts one more table that names a block",
    "BlockManager.free": "gives all blocks of the table back",
    "BlockPool.release": "counts one table less; at none the block is free, or cached if it was published",
    "BlockManager.publish": "makes full blocks findable, and shares one that holds the same already",
    "PrefixCache.publish": "enters a block under the digest of its tokens and all before them",
    "BlockPool.evict": "frees the cached block that would go first",
    "PrefixCache.forget": "removes a block's digest: nobody finds it any more",
    "BlockManager.swap_out": "plans copies of the sequence's blocks to host memory",
    "HostTier.swap_out": "takes host blocks, and holds both ends until the copies are done",
    "BlockManager.swap_in": "brings the sequence's blocks back into a device table",
    "HostTier.swap_in": "finds blocks on the device by content, and takes new ones for the others",
    "HostTier.drop": "gives the host blocks back",
}


class Call(msgspec.Struct, frozen=True):
    """A function of the block manager that ran, and what it is for."""

    name: str
    purpose: str


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Fill the list that is yielded with the functions of PURPOSES that run meanwhile, each once."""
    calls: list[Call] = []
    seen: set[str] = set()
    before = sys.getprofile()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_qualname
        if event != "call" or name not in PURPOSES or name in seen:
            return
        if str(Path(frame.f_code.co_filename).resolve().parent) == _MEMORY:
            seen.add(name)
            calls.append(Call(name, PURPOSES[name]))

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
