"""Which block holds the keys and values of which tokens: full blocks, found by content."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from quire.engine.arrays import as_blocks
from quire.engine.memory.pool import EVERY

Digest = bytes
"""16 bytes that stand for a block's tokens and all tokens before them."""


class BlockHasher:
    """Chains digests over full blocks: xxh3-128 of (digest of the block before, token ids), seeded.

    The seed is the deployment's own, and the chain of a request starts from the model and the tenant, so that
    digests can neither be predicted nor shared across tenants (CVE-2025-25183, CVE-2025-46570).
    """

    def __init__(self, block_size: int, seed: int, fingerprint: bytes = b"") -> None:
        self.block_size = block_size
        self._seed = seed
        self._fingerprint = fingerprint

    def root(self, salt: str) -> Digest:
        """Where the chain of a tenant's requests starts."""
        return xxhash.xxh3_128_digest(self._fingerprint + b"\0" + salt.encode(), self._seed)

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The token ids of each full block, as bytes."""
        pieces: list[bytes] = as_blocks(np.array(tokens, np.int32), self.block_size).tolist()
        return pieces

    def next(self, before: Digest, piece: bytes) -> Digest:
        return xxhash.xxh3_128_digest(before + piece, self._seed)


class Prefix(msgspec.Struct, eq=False, gc=False):
    """All tokens of a sequence up to the end of a full block, and the tenant whose they are.

    `piece` is that block's token ids as bytes, and `before` what comes before it. Where a tenant's chain
    begins, `piece` is the salt.
    """

    before: Prefix | None
    piece: bytes | str
    digest: Digest
    is_public: bool = False  # the operator's own, for every tenant to find

    def equals(self, other: Prefix | None) -> bool:
        """Whether both are the same tokens of the same tenant, to the very first.

        Equal ones share what is before them from then on, so whoever compares block after block looks at each
        block once.
        """
        mine: Prefix | None = self
        theirs = other
        pairs = []
        while mine is not theirs:
            if mine is None or theirs is None or mine.piece != theirs.piece:
                return False
            pairs.append((mine, theirs))
            mine, theirs = mine.before, theirs.before
        for own, same in pairs:
            own.before = same.before
        return True


class PrefixCache:
    """Digest to block, one to one. A hit compares the tokens too, so a collision costs a miss.

    A block is found from when it is promised or published on. Others than the plans of this process only
    hear of published ones.
    """

    def __init__(self, num_blocks: int) -> None:
        self.on_change: Callable[[Prefix, bool], None] | None = None  # published from now on, or no more
        self.promised: set[int] = set()  # blocks that are findable and not published
        self._blocks: dict[Digest, int] = {}
        self._prefixes: list[Prefix | None] = [None] * num_blocks  # of findable blocks
        self._times_forgotten = array("q", bytes(8 * num_blocks))

    def __len__(self) -> int:
        """How many blocks are published."""
        return len(self._blocks) - len(self.promised)

    def __contains__(self, block: int) -> bool:
        """Whether `block` is findable."""
        return self._prefixes[block] is not None

    def find(self, prefix: Prefix) -> int | None:
        """The block that holds the last tokens of `prefix`, computed after all its others."""
        block = self._blocks.get(prefix.digest)
        return block if block is not None and prefix.equals(self._prefixes[block]) else None

    def promise(self, prefixes: Sequence[Prefix], blocks: Sequence[int]) -> None:
        """Let each of `blocks` be found by its prefix, unless one that holds the same is."""
        for prefix, block in zip(prefixes, blocks, strict=True):
            if prefix.digest not in self._blocks:
                self._blocks[prefix.digest] = block
                self._prefixes[block] = prefix
                self.promised.add(block)

    def publish(self, prefix: Prefix, block: int) -> int | None:
        """Publish `block`, unless one that holds the same is; which one is then. None: a collision."""
        found = self._blocks.setdefault(prefix.digest, block)
        if found != block:
            if not prefix.equals(self._prefixes[found]):
                return None
            if found not in self.promised:
                return found
            self.forget(found)
            self._blocks[prefix.digest] = block
        elif self._prefixes[block] is not None:
            if block not in self.promised:
                return block
            self.promised.remove(block)
        self._prefixes[block] = prefix
        if self.on_change is not None:
            self.on_change(prefix, True)
        return block

    def prefix(self, block: int) -> Prefix:
        """What a findable block holds."""
        prefix = self._prefixes[block]
        assert prefix is not None, f"block {block} is not findable"
        return prefix

    def forget(self, block: int) -> None:
        """`block` is not to be found any more; perhaps it is going to hold something else."""
        prefix, self._prefixes[block] = self.prefix(block), None
        self._times_forgotten[block] += 1
        del self._blocks[prefix.digest]
        self.promised.discard(block)
        if self.on_change is not None:  # of a promise too: `prefixes` may have told of it
            self.on_change(prefix, False)

    def times_forgotten(self, blocks: array[int]) -> NDArray[np.int64]:
        """[N] how often each of `blocks` was forgotten: what was found in it is there until once more."""
        return np.asarray(self._times_forgotten)[np.asarray(blocks)]

    def prefixes(self) -> list[Prefix]:
        """All that are published. Another thread may ask: promises of this very moment may be among them."""
        held = enumerate(self._prefixes.copy())
        return [prefix for block, prefix in held if prefix is not None and block not in self.promised]

    def check(self, share: slice = EVERY) -> None:
        """Assert that digests and blocks, `share` of them, map one to one."""
        prefixes = self._prefixes
        for block, prefix in zip(range(len(prefixes))[share], prefixes[share], strict=True):
            assert prefix is None or self._blocks[prefix.digest] == block, f"block {block} is found elsewhere"
        assert len(self._blocks) == len(prefixes) - prefixes.count(None), "a digest of no block"
        assert all(block in self for block in self.promised), "a block is promised that is not findable"


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks that hold a sequence's first tokens: on the device, and after those in host memory."""

    device: Sequence[int]
    host: Sequence[int]

    def __len__(self) -> int:
        return len(self.device) + len(self.host)

    def first(self, count: int) -> Found:
        return Found(self.device[:count], self.host[: max(0, count - len(self.device))])
