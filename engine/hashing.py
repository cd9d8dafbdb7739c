"""Digests of full blocks, chained from block to block and salted by tenant (prefix caching)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import xxhash

from quire.engine.arrays import as_blocks

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


class Prefixes:
    """Makes the prefixes of requests, block after block, and knows the public ones.

    A request that begins with public blocks has these themselves for its first prefixes; its tenant's salt
    comes in where it leaves them. So all tenants share the blocks of a text that the operator has pinned, and
    nothing after it. That such a text is found at once tells a client what the operator serves, not what
    another client has asked: the timing side channel between tenants (CVE-2025-46570) stays closed.
    """

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._public: dict[tuple[Prefix | None, bytes], Prefix] = {}  # by what is before the block, and it

    def extend(self, prefixes: list[Prefix], pieces: Iterable[bytes], salt: str) -> None:
        """Add the blocks whose token ids are `pieces`: they follow `prefixes` in a request with this salt."""
        before = prefixes[-1] if prefixes else None
        for piece in pieces:
            if before is None or before.is_public:
                public = self._public.get((before, piece))
                if public is not None:
                    prefixes.append(before := public)
                    continue
                before = self._root(salt, before)
            before = Prefix(before, piece, self._hasher.next(before.digest, piece))
            prefixes.append(before)

    def make_public(self, tokens: Sequence[int]) -> list[Prefix]:
        """Make the full blocks at the beginning of `tokens` public; their prefixes."""
        prefixes: list[Prefix] = []
        before: Prefix | None = None
        for piece in self._hasher.pieces(tokens):
            digest = self._hasher.next(b"" if before is None else before.digest, piece)
            fresh = Prefix(before, piece, digest, is_public=True)
            before = self._public.setdefault((before, piece), fresh)
            prefixes.append(before)
        return prefixes

    def _root(self, salt: str, after: Prefix | None) -> Prefix:
        digest = self._hasher.root(salt)
        return Prefix(after, salt, digest if after is None else self._hasher.next(digest, after.digest))
