"""A router's state where Ray knows which replicas there are, and has the last word on who gets a request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from quire.engine.registry.redis import Load
from quire.ray.affinity import PrefixAffinity
from quire.ray.leases import HEADER
from quire.ray.wish import Blocks, Ranks, Wish
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError, not_ready
from quire.service.router.directory import Registered
from quire.service.router.placement import Location, Placement
from quire.service.router.prompt import Prompt
from quire.service.router.replica import Replica
from quire.service.router.state import RouterState

MAX_HELD_BYTES = 256 << 20
MAX_ATTEMPTS = 3  # with replicas that die before they answer
FORGIVEN_SECONDS = 2.0  # after which a replica that failed is tried again, if Ray still believes in it


class RayState(RouterState):
    """Each request has a lease of its replica, which Ray's router gives it by the request's own ranking."""

    def __init__(self, config: ServiceConfig, handle: Any) -> None:
        """`handle`: of the deployment of the replicas."""
        super().__init__(config, MAX_HELD_BYTES)
        self.affinity: PrefixAffinity | None = None  # None: the registry knows better, or nothing is cached
        self._handle = handle
        self._known: dict[str, Replica] = {}
        self._down_since: dict[str, float] = {}  # by URLs
        self._leases: set[asyncio.Task[None]] = set()

    @property
    def replicas(self) -> Iterable[Replica]:
        return self._known.values()

    def check_open(self) -> None:
        """Raises ApiError 503 once it shuts down."""
        if self.draining:
            raise not_ready("the router is shutting down", 5)

    def register(self, fingerprint: str, registered: Sequence[Registered]) -> bool:
        """Take in what the registry says of those that Ray knows. Return whether one of them is ready."""
        now, is_ready = time.monotonic(), False
        for entry in registered:
            replica = self._known.get(entry.url)
            if replica is not None:
                replica.fingerprint = fingerprint
                replica.report(entry.load, entry.epoch, entry.seq, now)
                is_ready |= replica.up
        return is_ready

    async def locate(self, prompt: Prompt | None) -> Location:
        """Return where a prompt's blocks are, by the registry, or by where they were sent."""
        if prompt is None or self.affinity is None:
            return await super().locate(prompt)
        return self.affinity.locate(prompt)

    async def everybody(self) -> Iterable[Replica]:
        """Raises ApiError 503 if Ray cannot say."""
        try:
            await self._handle.peek.remote(Wish(self._any))
        except (RayError, RayServeException) as error:
            raise not_ready(f"Ray cannot say which replicas there are: {error}", 2) from None
        return list(self._known.values())

    async def place_at(self, replica: Replica) -> Placement:
        lost = asyncio.Event()

        def rank(blocks: Blocks) -> Ranks:
            self._note(blocks)
            if replica.url not in self._known:
                lost.set()
                return []
            return [[replica.url]]

        _, headers = await self._lease(Wish(rank), lost, replica.lost)
        return replace(Placement.at_home(replica), headers=headers)

    async def place(self, location: Location, tried: set[Replica]) -> Placement:
        wanted: Placement | None = None

        def rank(blocks: Blocks) -> Ranks:
            nonlocal wanted
            self._note(blocks)
            known = list(self._known.values())
            new = [replica for replica in known if replica not in tried]
            left = [replica for replica in new if replica.up] or new or known
            if self.watch is None and self.affinity is None:
                return [_two_of(left), [replica.url for replica in left]]
            if wanted is None or wanted.replica not in left:
                wanted = self.choose(left, location)
            return [[wanted.replica.url], [replica.url for replica in left]]

        def failed(error: Exception) -> None:
            if wanted is not None:
                wanted.replica.lost(error)

        url, headers = await self._lease(Wish(rank), asyncio.Event(), failed)
        replica = self._known.get(url) or Replica(url, up=True)
        if wanted is None or wanted.replica is not replica:
            digests = location.digests(replica)
            if wanted is not None:  # it was full
                wanted.replica.sent_prefixes.refused(location.digests(wanted.replica))
            replica.sent_prefixes.add(digests, time.monotonic())
            wanted = Placement(replica, "load", location.prompt_tokens, 0, replica.load)
        if self.affinity is not None:
            self.affinity.add(url, location.digests(replica))
        return replace(wanted, headers=headers)

    async def close(self) -> None:
        """Wait no more for leases to end."""
        for lease in self._leases:
            lease.cancel()
        await asyncio.gather(*self._leases, return_exceptions=True)

    async def _lease(
        self, wish: Wish, lost: asyncio.Event, failed: Callable[[Exception], None]
    ) -> tuple[str, tuple[tuple[bytes, bytes], ...]]:
        """Return whose it is, and what the request must come with. Raises ApiError 429 or 503, as for a
        replica that is `lost`. `failed` is told of one that could give none."""
        for _ in range(MAX_ATTEMPTS):
            answers = self._handle.options(stream=True).lease.remote(wish)
            first = asyncio.ensure_future(anext(answers))
            first.add_done_callback(_hear)
            missing = asyncio.create_task(lost.wait())
            try:
                await asyncio.wait([first, missing], return_when=asyncio.FIRST_COMPLETED)
                if not first.done():
                    raise not_ready("the replica that has what is asked for is gone", 2)
                url, token = first.result()
            except BackPressureError:
                message = "so many requests wait for a replica already"
                raise ApiError(429, message, code="queue_full", retry_after=1) from None
            except (RayError, RayServeException) as error:  # the replica died
                failed(error)
                continue
            finally:
                missing.cancel()
                if not first.done():
                    answers.cancel()
                    first.cancel()
            ending = asyncio.create_task(_wait_for_end(answers))
            self._leases.add(ending)
            ending.add_done_callback(self._leases.discard)
            return url, ((HEADER, token),)
        raise not_ready("no replica could take the request", 2)

    def _any(self, blocks: Blocks) -> Ranks:
        self._note(blocks)
        return [list(blocks)]

    def _note(self, blocks: Blocks) -> None:
        """Note which replicas there are. One that failed may have done so once only."""
        now = time.monotonic()
        self._known = {url: self._known.get(url) or Replica(url, up=True) for url in blocks}
        if self.affinity is not None:
            self.affinity.follow(blocks)
            for url, replica in self._known.items():
                replica.report(Load(blocks=blocks[url]), "", 0, now)  # the registry would say so
        down = [replica for replica in self._known.values() if not replica.up]
        self._down_since = {replica.url: self._down_since.get(replica.url, now) for replica in down}
        for replica in down:
            replica.up = now - self._down_since[replica.url] >= FORGIVEN_SECONDS


def _two_of(replicas: Sequence[Replica]) -> list[str]:
    """Of two at random Ray takes the one with fewer requests (Mitzenmacher, 2001)."""
    return [replica.url for replica in random.sample(replicas, min(2, len(replicas)))]


def _hear(first: asyncio.Future[Any]) -> None:
    """Take in what it raises, also where nobody waits for it any more."""
    if not first.cancelled():
        first.exception()


async def _wait_for_end(answers: Any) -> None:
    """Ray must be told of a call's end by somebody who listens."""
    try:
        async for _ in answers:
            pass
    except (RayError, RayServeException):
        return
