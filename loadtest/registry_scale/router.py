"""A router without its HTTP: who is registered, where a prompt is, and the choice, by its own code."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import aiohttp

from quire.engine.hashing import Digest
from quire.engine.registry.deployment import Deployment
from quire.service.router.config import RouterConfig
from quire.service.router.directory import Directory, Registered
from quire.service.router.fleet import Fleet
from quire.service.router.placement import Location, Placement, choose
from quire.service.router.registry_watch import Identity, RegistryWatch


class Router:
    """Learns at each look at the registry who is ready, as if it had just asked for /ready."""

    def __init__(
        self,
        config: RouterConfig,
        directory: Directory,
        deployment: Deployment,
        seed: int,
        session: aiohttp.ClientSession,
        is_ready: Callable[[str], bool],
        rng: random.Random,
    ) -> None:
        """`is_ready`: whether the replica with a URL is."""
        self.unanswered = 0  # requests for which the registry said nothing in time
        self.choices = 0
        self.choice_seconds = 0.0  # of this process' own time
        self.fleet = Fleet(config, session)
        identity = Identity(deployment.model, deployment.revision, deployment.tokenizer, deployment.seed)
        self.watch = RegistryWatch(directory, identity, seed, self._register)
        self._config = config
        self._is_ready = is_ready
        self._rng = rng

    async def run(self) -> None:
        await self.watch.run(self._config.poll_seconds, self._config.scan_seconds)

    async def locate(self, tokens: list[int]) -> Location:
        location = await self.watch.locate("", tokens)
        self.unanswered += location.held is None
        return location

    def choose(self, location: Location, now: float) -> tuple[Placement, list[Digest]]:
        """Place a prompt; return its digests with it."""
        usable = [replica for replica in self.fleet if replica.usable]
        begin = time.process_time()
        placement = choose(usable, location, now, self._rng, silent=self.watch.state != "ok")
        self.choice_seconds += time.process_time() - begin
        self.choices += 1
        return placement, location.digests(placement.replica)

    def _register(self, fingerprint: str, registered: list[Registered]) -> bool:
        self.fleet.register(fingerprint, registered)
        for replica in self.fleet:
            replica.up = self._is_ready(replica.url)
        return any(self._is_ready(entry.url) for entry in registered)
