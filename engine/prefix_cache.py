"""Which block holds the keys and values of which tokens: full blocks, found by content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

Digest = bytes
"""16 bytes that stand for a block's tokens and all tokens before them."""

_TOKEN_BYTES = 4


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
        return self._digest(self._fingerprint + b"\0" + salt.encode())

    def pieces(self, tokens: Sequence[int], first_block: int = 0) -> list[bytes]:
        """The token ids of each full block from `first_block` on, as bytes."""
        size = self.block_size * _TOKEN_BYTES
        full = len(tokens) // self.block_size
        data = np.array(tokens[first_block * self.block_size : full * self.block_size], "<i4").tobytes()
        return [data[begin : begin + size] for begin in range(0, len(data), size)]

    def next(self, before: Digest, piece: bytes) -> Digest:
        return self._digest(before + piece)

    def _digest(self, data: bytes) -> Digest:
        return xxhash.xxh3_128_digest(data, self._seed)


@dataclass(frozen=True, slots=True)
class _Entry:
    block: int
    piece: bytes


class PrefixCache:
    """Digest to block, one to one. A hit compares the token ids too, so a collision costs a miss."""

    def __init__(self) -> None:
        self.on_change: Callable[[Digest, bool], None] | None = None  # findable from now on, or no more
        self._entries: dict[Digest, _Entry] = {}
        self._digests: dict[int, Digest] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, digest: Digest, piece: bytes) -> int | None:
        """The block that holds `piece` after the tokens that `digest` stands for."""
        entry = self._entries.get(digest)
        return entry.block if entry is not None and entry.piece == piece else None

    def publish(self, digest: Digest, piece: bytes, block: int) -> bool:
        """Make `block` findable; False when the digest is taken (by other tokens: a collision)."""
        if digest in self._entries:
            return False
        assert block not in self._digests, f"block {block} is published already"
        self._entries[digest] = _Entry(block, piece)
        self._digests[block] = digest
        if self.on_change is not None:
            self.on_change(digest, True)
        return True

    def describe(self, block: int) -> tuple[Digest, bytes]:
        """Digest and token ids of a published block."""
        digest = self._digests[block]
        return digest, self._entries[digest].piece

    def forget(self, block: int) -> None:
        """`block` is going to hold something else."""
        digest = self._digests.pop(block)
        del self._entries[digest]
        if self.on_change is not None:
            self.on_change(digest, False)

    def digests(self) -> list[Digest]:
        """All that are findable, the first published first. One operation, so another thread may ask."""
        return list(self._entries)

    def check(self) -> None:
        """Assert that digests and blocks map one to one."""
        assert {digest: entry.block for digest, entry in self._entries.items()} == {
            digest: block for block, digest in self._digests.items()
        }
        assert len(self._digests) == len(self._entries)
