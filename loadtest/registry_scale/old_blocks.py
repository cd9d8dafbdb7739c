"""What a full cache holds of prompts that nobody asks for again: 16 bytes a block, until it is to go."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.hashing import Digest, Prefix
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.registry.journal import Journal

PROMPT_BLOCKS = 125
DIGEST_BYTES = 16


class OldBlocks:
    """Prompts of PROMPT_BLOCKS each, the one first that goes first."""

    def __init__(self, digests: bytes) -> None:
        self._digests = digests  # one after another
        self._begin = 0  # of those that are still here

    def __len__(self) -> int:
        return (len(self._digests) - self._begin) // DIGEST_BYTES

    def digests(self) -> list[Digest]:
        """Return all, of each prompt its first block first."""
        return self._split(self._begin, len(self._digests))

    def take_prompt(self) -> list[Prefix]:
        """Return the prompt that goes first. It is not here any more."""
        end = min(self._begin + PROMPT_BLOCKS * DIGEST_BYTES, len(self._digests))
        begin, self._begin = self._begin, end
        prefixes: list[Prefix] = []
        for digest in self._split(begin, end):
            prefixes.append(Prefix(prefixes[-1] if prefixes else None, b"", digest))
        return prefixes

    def _split(self, begin: int, end: int) -> list[Digest]:
        return [self._digests[at : at + DIGEST_BYTES] for at in range(begin, end, DIGEST_BYTES)]


class FullJournal(Journal):
    """The journal of a cache and of old blocks beside it, whose publication is as old as they are."""

    def __init__(self, cache: PrefixCache, old: OldBlocks) -> None:
        super().__init__([cache])
        self._old = old

    def restart(self) -> list[Digest]:
        return [*super().restart(), *self._old.digests()]

    def recall(self, prefixes: Iterable[Prefix]) -> None:
        """Follow those from now on that are in the cache instead."""
        for prefix in prefixes:
            self._apply(0, prefix, True)  # what is reachable now has been told
