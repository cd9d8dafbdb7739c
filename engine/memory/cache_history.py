"""What the prefix cache held and holds, by which a miss is explained."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.engine.hashing import Digest, Prefix
from quire.engine.records import Miss

MAX_EVICTED = 1 << 16  # that are remembered


class CacheHistory:
    """Listens to caches. It explains a miss by blocks of the same salt only, or of salts of the same owner.

    Nothing that others have cached changes what it says, but for what is public.
    """

    def __init__(self, num_blocks: int) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self._most_evicted = min(num_blocks, MAX_EVICTED // 2)  # in each of these:
        self._evicted: dict[Digest, float] = {}  # when
        self._evicted_before: dict[Digest, float] = {}  # earlier ones, forgotten together
        self._following: dict[Digest, Prefix] = {}  # by what is before it: the block that was cached last
        self._salts: dict[bytes, dict[str, None]] = {}  # of cached first blocks, by their content

    def changed(self, prefix: Prefix, cached: bool) -> None:
        """Note that the last block of `prefix` is cached from now on, or no more."""
        before = prefix.before
        if cached:
            if before is not None:
                self._following[before.digest] = prefix
                if before.content.__class__ is str and prefix.content.__class__ is bytes:
                    self._salts.setdefault(prefix.content, {})[before.content] = None
            return
        evicted = self._evicted
        evicted[prefix.digest] = self.clock()
        if len(evicted) >= self._most_evicted:
            self._evicted, self._evicted_before = {}, evicted
        if before is not None:
            if self._following.get(before.digest) is prefix:
                del self._following[before.digest]
            if before.content.__class__ is str:
                self._forget_salt(prefix, before)

    def _forget_salt(self, prefix: Prefix, root: Prefix) -> None:
        salts = self._salts.get(prefix.content)  # type: ignore[arg-type]
        if salts is not None:
            salts.pop(root.content, None)  # type: ignore[arg-type]
            if not salts:
                del self._salts[prefix.content]  # type: ignore[arg-type]

    def explain(self, prefixes: Sequence[Prefix], found: int, block_size: int, owner: str) -> Miss:
        """Say why the `found`-th of a prompt's `prefixes` is cached nowhere.

        owner: what the salts of the request's owner begin with.
        """
        token = found * block_size
        if found >= len(prefixes):
            return Miss("partial_block", token)
        prefix = prefixes[found]
        evicted = self._evicted.get(prefix.digest, self._evicted_before.get(prefix.digest))
        if evicted is not None:
            return Miss("evicted", token, seconds=max(0.0, self.clock() - evicted))
        if self._is_salted_otherwise(prefix, owner):
            return Miss("salted_otherwise", token)
        differs = self._first_difference(prefix)
        if differs is None or (differs == 0 and not found):  # else every prompt would differ from some other
            return Miss("never_seen", token)
        return Miss("differs", token, differs_at=token + differs)

    def _is_salted_otherwise(self, prefix: Prefix, owner: str) -> bool:
        root = prefix.before
        if root is None or not isinstance(root.content, str) or not isinstance(prefix.content, bytes):
            return False
        salts = self._salts.get(prefix.content, ())
        return any(salt != root.content and salt.startswith(owner) for salt in salts)

    def _first_difference(self, prefix: Prefix) -> int | None:
        """Return at which of its tokens `prefix` leaves what was cached last after the same tokens."""
        other = None if prefix.before is None else self._following.get(prefix.before.digest)
        if other is None or not isinstance(other.content, bytes) or not isinstance(prefix.content, bytes):
            return None
        mine, theirs = (np.frombuffer(each, np.int32) for each in (prefix.content, other.content))
        differing = np.flatnonzero(mine != theirs)
        return int(differing[0]) if len(differing) else None
