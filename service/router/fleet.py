"""The replicas there are, and whether they can be sent anything."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

import aiohttp

from service.router.config import RouterConfig
from service.router.directory import Registered
from service.router.replica import Replica

log = logging.getLogger("quire.router")


class Fleet:
    """Replicas are given, or those behind a name, or come from the registry and stay while they answer: the
    registry may fail."""

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._session = session
        self._replicas = {url: Replica(url, up=False) for url in config.replicas}
        self._are_registered = not config.replicas and config.replica_dns is None

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def resolved(self, urls: Sequence[str]) -> None:
        """These are behind the name now. What runs elsewhere may end there."""
        for url in self._replicas.keys() - urls:
            log.info("replica %s is gone", self._replicas.pop(url).name)
        for url in urls:
            if url not in self._replicas:
                replica = self._replicas[url] = Replica(url, up=False)
                log.info("replica %s is there", replica.name)

    def register(self, fingerprint: str, registered: Sequence[Registered]) -> None:
        """Who the registry says is there. It adds to those that it knows only."""
        now = time.monotonic()
        for entry in registered:
            replica = self._replicas.get(entry.url)
            if replica is None and not self._are_registered:
                continue
            if replica is None:
                replica = self._replicas[entry.url] = Replica(entry.url, up=True)
                log.info("replica %s is there", replica.name)
            replica.fingerprint = fingerprint
            replica.report(entry.load, entry.epoch, entry.seq, now)

    async def probe(self) -> None:
        """Ask all replicas again and again whether they are ready."""
        while True:
            replicas = list(self)
            await asyncio.gather(*map(self._ask, replicas))
            self._forget(replicas)
            await asyncio.sleep(self._config.probe_seconds)

    async def _ask(self, replica: Replica) -> None:
        timeout = aiohttp.ClientTimeout(total=self._config.probe_timeout)
        was_draining = replica.draining
        try:
            for path in ("/health", "/ready"):
                async with self._session.get(replica.url + path, timeout=timeout) as answer:
                    if answer.status != 200:
                        raise aiohttp.ClientError(f"{path} says {answer.status}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            replica.lost(error)
            return
        if not replica.up:
            log.info("replica %s is ready", replica.name)
        replica.up = True
        if was_draining:  # not any more: a new process answers there, which the registry may not know yet
            replica.draining = False

    def _forget(self, replicas: list[Replica]) -> None:
        """What came from the registry goes when it is neither ready nor registered any more."""
        if not self._are_registered:
            return
        for replica in replicas:
            silent = time.monotonic() - replica.registered_at > self._config.forget_seconds
            if silent and not replica.up and not replica.in_flight:
                del self._replicas[replica.url]
                log.info("replica %s is gone", replica.name)
