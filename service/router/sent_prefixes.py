"""Prefixes that this router has sent to a replica of late, and how much room they take there."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.hashing import Digest

UNPUBLISHED_SECONDS = 1.0  # after an answer begins: by then the registry knows what its prompt left behind
ONCE_SECONDS = 60.0  # how long a block counts that was sent once: it may have been a question
REMEMBERED_SECONDS = 600.0  # and one that was sent again: it is part of a prefix
MAX_DIGESTS = 1 << 16


class _Sent(NamedTuple):
    """The newest request with a block; `published`: from when on the registry knows better."""

    at: float
    published: float


class SentPrefixes:
    """Blocks by their digests, split as in 2Q (Johnson and Shasha, 1994), so that questions which nobody
    asks twice do not look like prefixes that are wanted."""

    def __init__(self) -> None:
        self._once: OrderedDict[Digest, _Sent] = OrderedDict()  # the one sent longest ago first
        self._again: OrderedDict[Digest, _Sent] = OrderedDict()  # here, too

    def add(self, digests: Sequence[Digest], now: float) -> None:
        """Note that a prompt is sent; `answered` tells what became of it."""
        sent = _Sent(now, math.inf)
        for digest in reversed(digests):  # so that the end of a prompt is forgotten before its beginning
            known = self._once.pop(digest, None) or self._again.pop(digest, None)
            (self._once if known is None else self._again)[digest] = sent
        self._forget_old(now)

    def answered(self, digests: Sequence[Digest], now: float) -> None:
        """Note that the answer begins, or there is none: nothing of the prompt is being computed any more."""
        published = now + UNPUBLISHED_SECONDS
        marks: dict[float, _Sent] = {}  # blocks that were sent together share one
        for digest in digests:
            for blocks in (self._once, self._again):
                sent = blocks.get(digest)
                if sent is not None and sent.published > published:
                    blocks[digest] = marks.setdefault(sent.at, _Sent(sent.at, published))

    def refused(self, digests: Sequence[Digest]) -> None:
        """Note that a prompt that was sent was not taken: what nobody else sent is not there."""
        for digest in digests:
            self._once.pop(digest, None)

    def forget(self, digests: Sequence[Digest]) -> None:
        """Note that these are known not to be there."""
        for digest in digests:
            self._once.pop(digest, None)
            self._again.pop(digest, None)

    def match(self, digests: Sequence[Digest], now: float) -> int:
        """Return how many of a prompt's first blocks have been sent lately."""
        self._forget_old(now)
        for count, digest in enumerate(digests):
            if digest not in self._once and digest not in self._again:
                return count
        return len(digests)

    def unpublished(self, digests: Sequence[Digest], now: float) -> int:
        """Return how many of a prompt's first blocks are there or on their way, by what was sent."""
        for count, digest in enumerate(digests):
            sent = self._once.get(digest) or self._again.get(digest)
            if sent is None or sent.published <= now:
                return count
        return len(digests)

    def size(self, now: float) -> int:
        """Return the working set (Denning, 1968): how many different blocks have been sent lately."""
        self._forget_old(now)
        return len(self._once) + len(self._again)

    def _forget_old(self, now: float) -> None:
        for blocks, seconds in ((self._once, ONCE_SECONDS), (self._again, REMEMBERED_SECONDS)):
            while blocks:
                oldest = blocks[next(iter(blocks))]
                if oldest.at > now - seconds and len(blocks) <= MAX_DIGESTS:
                    break
                blocks.popitem(last=False)
