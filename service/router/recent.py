"""Prefixes that this router has sent to a replica of late."""

from __future__ import annotations

from collections.abc import Sequence

from engine.prefix_cache import Digest

UNPUBLISHED_SECONDS = 5.0  # by then a prefix is prefilled and in the registry, or something is amiss
REMEMBERED_SECONDS = 60.0  # for when the registry does not answer
MAX_DIGESTS = 1 << 16


class RecentPrefixes:
    def __init__(self) -> None:
        self._sent: dict[Digest, float] = {}  # when, the oldest first

    def add(self, digests: Sequence[Digest], now: float) -> None:
        for digest in digests:
            self._sent.pop(digest, None)
            self._sent[digest] = now
        while self._sent:
            oldest = next(iter(self._sent))
            if self._sent[oldest] > now - REMEMBERED_SECONDS and len(self._sent) <= MAX_DIGESTS:
                return
            del self._sent[oldest]

    def match(self, digests: Sequence[Digest], since: float) -> int:
        """How many of a prompt's first blocks have been sent after `since`."""
        for count, digest in enumerate(digests):
            if self._sent.get(digest, since) <= since:
                return count
        return len(digests)
