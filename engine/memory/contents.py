"""Which blocks hold which tokens: how far a prompt is found, and why no further."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from quire.engine.arrays import as_int32
from quire.engine.hashing import BlockHasher, Prefix, Prefixes
from quire.engine.memory.cache_history import CacheHistory
from quire.engine.memory.host_tier import HostTier
from quire.engine.memory.pinned_tails import PinnedTails
from quire.engine.memory.pool import BlockPool
from quire.engine.memory.prefix_cache import Found, Match, PrefixCache
from quire.engine.memory.window_groups import WindowGroups
from quire.engine.memory.window_match import WindowMatch
from quire.engine.records import Miss
from quire.engine.sequences.sequence import Sequence


class Contents:
    """Names the full blocks of sequences, and looks them up in the indices of both tiers.

    With windows a sequence can go on from where all cache groups have what it reads.
    """

    def __init__(
        self,
        block_size: int,
        hasher: BlockHasher | None,
        cache: PrefixCache,
        windows: WindowGroups | None,
        host: HostTier,
        tails: PinnedTails,
        history: CacheHistory,
        *,
        keeps_all: bool,
    ) -> None:
        """cache: of the first cache group, on the device. keeps_all: whether that is none of `windows`."""
        self._block_size = block_size
        self._prefixes = None if hasher is None else Prefixes(hasher)
        self._cache = cache
        self._keeps_all = keeps_all
        self._windows = windows
        self._host = host
        self._tails = tails
        self._history = history
        self._matches: dict[Sequence, Match] = {}  # of sequences that wait
        self._window_matches: dict[Sequence, WindowMatch] = {}

    @property
    def are_indexed(self) -> bool:
        """Return whether anything is ever found."""
        return self._prefixes is not None

    def extend(self, sequence: Sequence, num_blocks: int) -> list[Prefix]:
        """Return the prefixes of `sequence`, its first `num_blocks` at least; none without a prefix cache."""
        prefixes = sequence.prefixes
        if self._prefixes is not None and len(prefixes) < num_blocks:
            contents = sequence.block_contents(self._block_size, len(prefixes), num_blocks)
            self._prefixes.extend(prefixes, contents, sequence.salt)
        return prefixes

    # -- what is found ---------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> Found:
        """Return the blocks that hold the first tokens of `sequence`, as many as are findable.

        They are remembered until `drop`, for the next time.
        """
        prefixes = self.extend(sequence, sequence.num_tokens // self._block_size)
        most = min(len(prefixes), (sequence.num_tokens - 1) // self._block_size)
        if not self._keeps_all:
            return self._behind_windows(sequence, Found([], []), most)
        match = self._matches.get(sequence)
        if match is None or match.prefixes is not prefixes:
            match = self._matches[sequence] = Match(prefixes, self._cache, self._host.cache)
        found = match.renew()
        return found if self._windows is None else self.first_of(sequence, found, most)

    def first_of(self, sequence: Sequence, found: Found, count: int) -> Found:
        """Return what `match` would find if it looked for at most `count` blocks of `sequence`.

        Behind a window there may be fewer: a sequence goes on only from where each group has what it reads.
        """
        if self._windows is None:
            return found.first(count)
        return self._behind_windows(sequence, found, min(count, len(found)))

    def first_on_device(self, sequence: Sequence, found: Found, count: int) -> Found:
        """Return the same of the device alone."""
        most = min(count, len(found.device) if self._keeps_all else len(found))
        if self._windows is None:
            return found.first(most)
        return self._behind_windows(sequence, found, most, in_host=False)

    def _behind_windows(self, sequence: Sequence, found: Found, most: int, *, in_host: bool = True) -> Found:
        """Return what is found, up to `most` blocks, where `found` has what layers need that keep all."""
        assert self._windows is not None
        if in_host:
            end, windows = self._window_match(sequence, self._windows).renew(most)
        else:
            end, windows = self._windows.match(sequence.prefixes, most)
        return replace(found.first(end), windows=windows)

    def _window_match(self, sequence: Sequence, windows: WindowGroups) -> WindowMatch:
        prefixes, match = sequence.prefixes, self._window_matches.get(sequence)
        if match is None or match.prefixes is not prefixes:
            host_caches = self._host.caches[-len(windows) :] if self._host.pool.num_blocks else ()
            match = self._window_matches[sequence] = windows.begin_match(prefixes, host_caches)
        return match

    def with_tail(self, sequence: Sequence, found: Found) -> Found:
        """Return `found`, and a pinned block that begins with what comes next, all but the last token."""
        if not len(self._tails) or found.host:
            return found
        num_blocks = len(found.device)
        before = sequence.prefixes[num_blocks - 1] if num_blocks else None
        rest = sequence.tokens[num_blocks * self._block_size : -1]
        return replace(found, tail=self._tails.find(before, rest))

    def drop(self, sequence: Sequence) -> None:
        """Remember no more what was found for `sequence`."""
        self._matches.pop(sequence, None)
        self._window_matches.pop(sequence, None)

    def explain_miss(self, sequence: Sequence, found: int) -> Miss:
        """Say why the `found`-th block of `sequence`, for which they were matched, was not found."""
        prefixes, owner = sequence.prefixes, sequence.group.request.owner
        caches = [self._cache] if self._windows is None else [self._cache, self._host.cache]
        if found < len(prefixes) and any(cache.find(prefixes[found]) is not None for cache in caches):
            if self._windows is not None and (found + 1) * self._block_size < sequence.num_tokens:
                return Miss("behind_window", found * self._block_size)
            return Miss("last_token", found * self._block_size)
        return self._history.explain(prefixes, found, self._block_size, owner)

    # -- what is never to be found, and what always -----------------------------------------------------

    def forget(self, sequence: Sequence, pool: BlockPool, caches: list[PrefixCache]) -> None:
        """Have nobody find what `sequence` has computed: it is worth nothing.

        Whoever shares some of it already goes on: a NaN among keys or values becomes one in its own logits.
        pool, caches: of the device.
        """
        for prefix in self.extend(sequence, sequence.num_tokens // self._block_size)[sequence.num_found :]:
            for cache in caches:
                _discard(cache, pool, prefix)
            for cache in self._host.caches:
                _discard(cache, self._host.pool, prefix)

    def open_to_all(self, tokens: list[int]) -> list[Prefix]:
        """Let all tenants find the blocks of `tokens` once they are computed; return the full ones' prefixes.

        What is left of the tokens is found behind these. Raises ValueError without a prefix cache.
        """
        if self._prefixes is None:
            raise ValueError(
                "--pin-prefix needs the prefix cache: leave out --no-enable-prefix-caching (a model that "
                "pools all tokens of a prompt has none)"
            )
        prefixes = self._prefixes.make_public(tokens)
        rest = as_int32(tokens[len(prefixes) * self._block_size :])
        if len(rest) and self._windows is None:  # a tail is one block
            self._tails.want(prefixes[-1] if prefixes else None, rest)
        return prefixes

    def pinned_blocks(self, prefixes: list[Prefix]) -> list[int]:
        """Return the blocks that a sequence needs which begins with all of `prefixes`, just computed."""
        blocks: list[int] = []
        if self._keeps_all:
            blocks = [block for prefix in prefixes if (block := self._cache.find(prefix)) is not None]
            assert len(blocks) == len(prefixes), "a prefix is pinned before it was computed"
        if self._windows is not None:
            end, found = self._windows.match(prefixes, len(prefixes))
            assert end == len(prefixes), "a prefix is pinned whose window was evicted"
            blocks += chain.from_iterable(each.blocks for each in found)
        return blocks

    def keep_tail(self, sequence: Sequence, context: int, pool: BlockPool) -> None:
        """Keep the last block of `sequence` if it holds the tail that was asked for, and nothing else.

        context: how many of its tokens are computed.
        """
        full = sequence.num_tokens // self._block_size
        if len(sequence.table) > full and context == sequence.num_tokens:
            before = self.extend(sequence, full)[full - 1] if full else None
            block = sequence.table[full]
            if self._tails.keep(before, sequence.tokens[full * self._block_size :], block):
                pool.keep(block)


def _discard(cache: PrefixCache, pool: BlockPool, prefix: Prefix) -> None:
    block = cache.find(prefix)
    if block is not None and not pool.is_pinned(block):
        if block not in cache.computing:
            pool.discard(block)
        cache.forget(block)
