"""Where the tokens of some requests are, for whoever made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from quire.engine.hashing import Prefix
from quire.engine.inspection.messages import OwnAnswer
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.sequence import SequenceGroup
from quire.engine.sequences.window_table import WindowTable

MOST_LOOKS = 16_384  # for one answer, which takes the engine a few milliseconds at most
_MOST_REMEMBERED = 4096  # sequences of all requests that were asked about

T = TypeVar("T")


class _Looks:
    """So many requests, table entries and prefixes may still be looked at."""

    def __init__(self, left: int) -> None:
        self._left = left
        self.partial = False  # there were more

    def take(self, places: Sequence[T]) -> Sequence[T]:
        """Return the first of them, as many as may be."""
        if len(places) > self._left:
            places, self.partial = places[: self._left], True
        self._left -= len(places)
        return places


class OwnBlocks:
    """Counts them by their tables; of one that has ended, by content, if it was asked about while it ran."""

    def __init__(self, state: SchedulerState, most_looks: int = MOST_LOOKS) -> None:
        self._state = state
        self._most_looks = most_looks
        self._asked: dict[int, list[list[Prefix]]] = {}  # by request, the latest last: of each sequence

    def count(self, requests: Iterable[int]) -> OwnAnswer:
        """Count what there is in the first of them, as far as the bound on looks reaches."""
        pool, host = self._state.blocks.pool, self._state.blocks.host.pool
        named: set[int] = set()
        on_host: set[int] = set()
        found: set[int] = set()
        looks = _Looks(self._most_looks)
        for request in requests:
            if not looks.take([request]):
                break
            group = self._state.groups.get(request)
            if group is not None:
                self._remember(request, group)
                for sequence in group.live:
                    named.update(looks.take(_first_table(sequence.tables)))
                    on_host.update(looks.take(_first_table(sequence.host_tables)))
            for prefixes in self._asked.get(request, ()):
                found |= self._cached(looks.take(prefixes))
        self._forget()
        blocks = named | found
        active = {block for block in blocks if pool.count(block)}
        return OwnAnswer(
            active=len(active),
            shared=sum(pool.count(block) > 1 or block not in named for block in active),
            cached=len(blocks) - len(active),
            host=sum(host.count(block) > 0 for block in on_host),
            partial=looks.partial,
        )

    def _remember(self, request: int, group: SequenceGroup) -> None:
        """Remember the prefixes of a group's sequences, in lists that grow with these."""
        self._asked.pop(request, None)
        self._asked[request] = [sequence.prefixes for sequence in group.sequences]

    def _forget(self) -> None:
        """Keep the latest, which together have no more prefixes than there are blocks; one at least."""
        sizes = [sum(1 + len(prefixes) for prefixes in each) for each in self._asked.values()]
        sequences, prefixes = sum(map(len, self._asked.values())), sum(sizes)
        for request, size in zip(list(self._asked)[:-1], sizes, strict=False):
            if sequences <= _MOST_REMEMBERED and prefixes <= self._state.blocks.pool.num_blocks:
                return
            sequences -= len(self._asked.pop(request))
            prefixes -= size

    def _cached(self, prefixes: Sequence[Prefix]) -> set[int]:
        places = map(self._state.blocks.cache.find, prefixes)
        return {block for block in places if block is not None}


def _first_table(tables: list[WindowTable]) -> list[int]:
    """Return the blocks of the first cache group, by whose content those of ended requests are found."""
    return tables[0].blocks if tables else []
