"""The router's process: binds at once, then finds replicas, and ends in order."""

from __future__ import annotations

import asyncio
import logging
from asyncio import FIRST_COMPLETED

import aiohttp

from quire.engine.urls import split_address
from quire.service.config import ServiceConfig
from quire.service.http.lifecycle import OrderlyServer
from quire.service.router.allowed import AllowedReplicas, AllowedResolver
from quire.service.router.app import create_app
from quire.service.router.config import RouterConfig
from quire.service.router.dns_discovery import DnsDiscovery
from quire.service.router.fleet import Fleet
from quire.service.router.reading import start_reading, stop_reading
from quire.service.router.sessions import open_session
from quire.service.router.state import RouterState

log = logging.getLogger("quire.router")


def session_of(router: RouterConfig) -> aiohttp.ClientSession:
    """Return connections to replicas; where a registry is believed only to those that are allowed."""
    allowed = AllowedReplicas(router.allow_replicas)
    resolver = AllowedResolver(allowed) if router.registry_is_believed else None
    return open_session(router.connect_timeout, resolver)


class RouterServer(OrderlyServer):
    def __init__(self, config: ServiceConfig, router: RouterConfig) -> None:
        self._router = router
        self.state = RouterState(config, router.max_held_bytes)
        super().__init__(create_app(self.state), config, self.state)
        self._upkeep: list[asyncio.Task[None]] = []

    async def _run(self) -> None:
        """Raises what loading the tokenizer raises."""
        state, router = self.state, self._router
        state.session = session_of(router)
        state.fleet = Fleet(router, state.session)
        self._upkeep.append(asyncio.create_task(state.fleet.probe()))
        if router.replica_dns is not None:
            host, port = split_address("--replica-dns", router.replica_dns)
            names = DnsDiscovery(host, port, state.fleet.resolved)
            self._upkeep.append(asyncio.create_task(names.run(router.resolve_seconds)))
        if router.redis_url is not None:
            watching = await start_reading(state, router, state.fleet.register)
            self._upkeep.append(asyncio.create_task(watching))
        log.info("routing %s at %s", self._service_config.served_model_names[0], self.url)
        stopped = asyncio.create_task(self._stop.wait())
        for ended in (await asyncio.wait([stopped, *self._upkeep], return_when=FIRST_COMPLETED))[0]:
            ended.result()

    async def _close(self) -> None:
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        if self.state.session is not None:
            await self.state.session.close()
        if self.state.exporter is not None:
            await asyncio.to_thread(self.state.exporter.close)
        await stop_reading(self.state)
