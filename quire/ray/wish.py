"""What a request wants of the choice of its replica, from the ingress to Ray's router in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

Blocks = Mapping[str, int]  # how many KV blocks each replica has that there is, by its URL
Ranks = Sequence[Sequence[str]]  # URLs: any of the first, unless all of these are full, and so on


class Wish:
    """A request's own ranking of replicas. It is asked in the event loop that made it.

    Ray sends a call's arguments on to the replica that it has chosen, where nobody needs a wish: it arrives
    there as an empty text.
    """

    def __init__(self, rank: Callable[[Blocks], Ranks]) -> None:
        self._rank = rank
        self._loop = asyncio.get_running_loop()

    async def rank(self, blocks: Blocks) -> Ranks:
        """Ask, from whatever event loop."""
        asked = asyncio.run_coroutine_threadsafe(self._ranked(blocks), self._loop)
        return await asyncio.wrap_future(asked)

    async def _ranked(self, blocks: Blocks) -> Ranks:
        return self._rank(blocks)

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        return str, ()
