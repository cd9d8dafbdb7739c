"""The replicas there are, and whether they can be sent anything."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Sequence

import aiohttp

from quire.service.router.allowed import AllowedReplicas
from quire.service.router.complaints import Complaints
from quire.service.router.config import RouterConfig
from quire.service.router.directory import Registered
from quire.service.router.replica import Replica

log = logging.getLogger("quire.router")

MAX_REPLICAS = 1024  # that come from the registry

_READ_BYTES = 4096  # of a probe's answer


class Fleet:
    """Replicas are given, or those behind a name, or come from the registry and stay while they answer: the
    registry may fail."""

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._session = session
        self._replicas = {url: Replica(url, up=False) for url in config.replicas}
        self._are_registered = config.registry_is_believed
        self._allowed = AllowedReplicas(config.allow_replicas)
        self._complaints = Complaints()
        self._asked: dict[Replica, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def resolved(self, urls: Sequence[str]) -> None:
        """Note who is behind the name now. What runs elsewhere may end there, unless that falls silent."""
        for replica in self:
            replica.leaving = replica.url not in urls
        self._forget()
        for url in urls:
            if url not in self._replicas:
                log.info("replica %s is there", self._add(url).name)

    def register(self, fingerprint: str, registered: Sequence[Registered]) -> bool:
        """Take in who the registry says is there, new ones where it is believed. Return if one is ready.

        Anybody may write there: who is new gets nothing before it has answered that it is ready.
        """
        self._admit([entry.url for entry in registered if entry.url not in self._replicas])
        now, is_ready = time.monotonic(), False
        for entry in registered:
            replica = self._replicas.get(entry.url)
            if replica is None:
                continue
            replica.fingerprint = fingerprint
            replica.report(entry.load, entry.epoch, entry.seq, now)
            is_ready |= replica.up
        return is_ready

    def _admit(self, urls: Sequence[str]) -> None:
        """Add those of new ones that are wanted.

        If they are too many, any of them have the room that there is, and that of those who were asked and
        have never been ready: whatever is registered, who is ready gets in, and stays.
        """
        if not self._are_registered:
            return
        wanted = [url for url in dict.fromkeys(urls) if self._is_wanted(url)]
        excess = len(self._replicas) + len(wanted) - MAX_REPLICAS
        if excess <= 0:
            for url in wanted:
                log.info("replica %s is there", self._add(url).name)
            return
        self._complaints.make(logging.WARNING, "", f"more than {MAX_REPLICAS} replicas are registered")
        for replica in self._asked_in_vain()[:excess]:
            del self._replicas[replica.url]
        random.shuffle(wanted)
        for url in wanted[: MAX_REPLICAS - len(self._replicas)]:
            self._add(url)

    def _asked_in_vain(self) -> list[Replica]:
        asking = {replica for replica, task in self._asked.items() if not task.done()}
        rest = [replica for replica in self if not replica.in_flight and replica not in asking]
        return [replica for replica in rest if replica.has_been_ready is False]

    def _add(self, url: str) -> Replica:
        replica = self._replicas[url] = Replica(url, up=False)
        return replica

    def _is_wanted(self, url: str) -> bool:
        if self._allowed.admits(url):
            return True
        self._complaints.make(
            logging.WARNING,
            url,
            f"{url} is registered and not routed to: its host is not in "
            f"{', '.join(self._config.allow_replicas) or 'a private network'} (--allow-replica)",
        )
        return False

    async def probe(self) -> None:
        """Ask all replicas again and again whether they are ready. No one's silence keeps others waiting."""
        try:
            while True:
                self._asked = {replica: task for replica, task in self._asked.items() if not task.done()}
                for replica in self:
                    if replica not in self._asked:
                        self._asked[replica] = asyncio.create_task(self._ask(replica))
                self._forget()
                await asyncio.sleep(self._config.probe_seconds)
        finally:
            for task in self._asked.values():
                task.cancel()

    async def _ask(self, replica: Replica) -> None:
        timeout = aiohttp.ClientTimeout(total=self._config.probe_timeout)
        was_draining = replica.draining
        try:
            for path in ("/health", "/ready"):
                url = replica.url + path
                async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
                    replica.note_probe(answered=True)
                    await answer.content.read(_READ_BYTES)  # what is unread would cost the connection
                    if answer.status != 200:
                        raise aiohttp.ClientError(f"{path} says {answer.status}")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:  # ValueError: of its name
            replica.lost(error)
            replica.has_been_ready = replica.has_been_ready or False
            if isinstance(error, TimeoutError):
                replica.note_probe(answered=False)
            return
        if not replica.up:
            log.info("replica %s is ready", replica.name)
        replica.up = replica.has_been_ready = True
        if was_draining:  # not any more: a new process answers there, which the registry may not know yet
            replica.draining = False

    def _forget(self) -> None:
        """Drop who has nothing of ours and is behind the name no more, or neither ready nor registered."""
        for replica in list(self):
            if not replica.in_flight and (replica.leaving or self._is_deserted(replica)):
                del self._replicas[replica.url]
                log.info("replica %s is gone", replica.name)

    def _is_deserted(self, replica: Replica) -> bool:
        silent = time.monotonic() - replica.registered_at > self._config.forget_seconds
        return self._are_registered and silent and not replica.up
