"""Chains of prefixes: what each full block of a request holds, and whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.memory.prefix_cache import BlockHasher, Prefix


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

    def publish(self, tokens: Sequence[int]) -> list[Prefix]:
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
