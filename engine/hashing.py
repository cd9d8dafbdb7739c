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
        """Return the digest that the chain of a tenant's requests starts from."""
        return xxhash.xxh3_128_digest(self._fingerprint + b"\0" + salt.encode(), self._seed)

    def block_contents(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the token ids of each full block, as bytes."""
        contents: list[bytes] = as_blocks(np.array(tokens, np.int32), self.block_size).tolist()
        return contents

    def next(self, before: Digest, content: bytes) -> Digest:
        """Return the digest of a block with this content after that of the block before."""
        return xxhash.xxh3_128_digest(before + content, self._seed)


class Prefix(msgspec.Struct, eq=False, gc=False):
    """A full block and all that comes before it in a sequence of some tenant.

    `content` is the block's token ids as bytes. Where a tenant's chain begins, it is the salt.
    """

    before: Prefix | None
    content: bytes | str
    digest: Digest
    is_public: bool = False  # the operator's own, for every tenant to find

    @property
    def previous(self) -> Prefix | None:
        """Return the block before, across the place where a tenant's salt comes in."""
        before = self.before
        if before is not None and isinstance(before.content, str):
            before = before.before
        return before

    @property
    def parent(self) -> Digest | None:
        """Return the digest of the block before."""
        previous = self.previous
        return None if previous is None else previous.digest

    def equals(self, other: Prefix | None) -> bool:
        """Return whether both are the same tokens of the same tenant, to the very first.

        Equal ones share what is before them from then on, so whoever compares block after block looks at each
        block once.
        """
        mine: Prefix | None = self
        theirs = other
        pairs = []
        while mine is not theirs:
            if mine is None or theirs is None or mine.content != theirs.content:
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

    def extend(self, prefixes: list[Prefix], contents: Iterable[bytes], salt: str) -> None:
        """Add the blocks with these `contents`, which follow `prefixes` in a request with this salt."""
        before = prefixes[-1] if prefixes else None
        for content in contents:
            if before is None or before.is_public:
                public = self._public.get((before, content))
                if public is not None:
                    prefixes.append(before := public)
                    continue
                before = self._root(salt, before)
            before = Prefix(before, content, self._hasher.next(before.digest, content))
            prefixes.append(before)

    def make_public(self, tokens: Sequence[int]) -> list[Prefix]:
        """Make the full blocks at the beginning of `tokens` public; return their prefixes."""
        prefixes: list[Prefix] = []
        before: Prefix | None = None
        for content in self._hasher.block_contents(tokens):
            digest = self._hasher.next(b"" if before is None else before.digest, content)
            fresh = Prefix(before, content, digest, is_public=True)
            before = self._public.setdefault((before, content), fresh)
            prefixes.append(before)
        return prefixes

    def _root(self, salt: str, after: Prefix | None) -> Prefix:
        digest = self._hasher.root(salt)
        return Prefix(after, salt, digest if after is None else self._hasher.next(digest, after.digest))
