"""Where the tokens of some requests are, for whoever made them."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.hashing import Prefix
from quire.engine.inspection.messages import OwnAnswer
from quire.engine.schedule.state import SchedulerState
from quire.engine.sequences.sequence import SequenceGroup


class OwnBlocks:
    """Counts them by their tables; of one that has ended, by content, if it was asked about while it ran."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._asked: dict[int, list[list[Prefix]]] = {}  # by request, the latest last: of each sequence

    def count(self, requests: Iterable[int]) -> OwnAnswer:
        pool, host = self._state.blocks.pool, self._state.blocks.host.pool
        named: set[int] = set()
        on_host: set[int] = set()
        found: set[int] = set()
        for request in requests:
            group = self._state.groups.get(request)
            if group is not None:
                self._remember(request, group)
                for sequence in group.live:
                    named.update(sequence.table)
                    on_host.update(sequence.host_table)
            for prefixes in self._asked.get(request, ()):
                found |= self._cached(prefixes)
        blocks = named | found
        active = {block for block in blocks if pool.count(block)}
        return OwnAnswer(
            active=len(active),
            shared=sum(pool.count(block) > 1 or block not in named for block in active),
            cached=len(blocks) - len(active),
            host=sum(host.count(block) > 0 for block in on_host),
        )

    def _remember(self, request: int, group: SequenceGroup) -> None:
        """The lists grow with the sequences. All together have no more prefixes than there are blocks."""
        self._asked.pop(request, None)
        self._asked[request] = [sequence.prefixes for sequence in group.sequences]
        while len(self._asked) > 1 and self._size() > self._state.blocks.pool.num_blocks:
            del self._asked[next(iter(self._asked))]

    def _size(self) -> int:
        return sum(1 + len(prefixes) for each in self._asked.values() for prefixes in each)

    def _cached(self, prefixes: list[Prefix]) -> set[int]:
        places = map(self._state.blocks.cache.find, prefixes)
        return {block for block in places if block is not None}
