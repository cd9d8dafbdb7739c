"""The router's process: binds at once, then finds replicas, and ends in order."""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import FIRST_COMPLETED

import aiohttp

from quire.engine.models.config import read_max_positions
from quire.engine.models.hub import TOKENIZER_FILES, resolve_model
from quire.engine.registry.deployment import hash_seed, model_id, revision, seed_digest, tokenizer_digest
from quire.engine.urls import split_address
from quire.service.config import ServiceConfig
from quire.service.http.lifecycle import OrderlyServer
from quire.service.router.allowed import AllowedReplicas, AllowedResolver
from quire.service.router.app import create_app
from quire.service.router.config import RouterConfig
from quire.service.router.directory import Directory
from quire.service.router.dns_discovery import DnsDiscovery
from quire.service.router.fleet import Fleet
from quire.service.router.prompt import PromptReader
from quire.service.router.registry_watch import Identity, RegistryWatch
from quire.service.router.state import RouterState
from quire.service.text.tokenizer import Tokenizer

log = logging.getLogger("quire.router")

IDLE_SECONDS = 30.0  # half of what replicas keep an idle connection for
# A machine that vanished says nothing: its connections are given up after 10 + 3 * 5 s.
_TCP_OPTIONS = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


def route(config: ServiceConfig, router: RouterConfig) -> int:
    """Routes until a signal. Returns the exit code, 0; raises ServerFailed."""
    return RouterServer(config, router).serve_until_stopped()


class RouterServer(OrderlyServer):
    def __init__(self, config: ServiceConfig, router: RouterConfig) -> None:
        self.state = RouterState(config, router)
        super().__init__(create_app(self.state), config, self.state)
        self._upkeep: list[asyncio.Task[None]] = []

    async def _run(self) -> None:
        """Raises what loading the tokenizer raises."""
        state, router = self.state, self.state.router
        state.session = _open_session(router)
        state.fleet = Fleet(router, state.session)
        self._upkeep.append(asyncio.create_task(state.fleet.probe()))
        if router.replica_dns is not None:
            host, port = split_address("--replica-dns", router.replica_dns)
            names = DnsDiscovery(host, port, state.fleet.resolved)
            self._upkeep.append(asyncio.create_task(names.run(router.resolve_seconds)))
        if router.redis_url is not None:
            identity, tokenizer, max_tokens = await asyncio.to_thread(_load, router)
            if tokenizer.chat_template is not None:
                await state.renderer.start(tokenizer.chat_template)
            state.reader = PromptReader(tokenizer, state.pool, state.renderer, max_tokens)
            directory = Directory(router.redis_url)
            state.watch = RegistryWatch(
                directory, identity, hash_seed(router.cache_seed), state.fleet.register
            )
            watching = state.watch.run(router.poll_seconds, router.scan_seconds)
            self._upkeep.append(asyncio.create_task(watching))
        log.info("routing %s at %s", self._service_config.served_model_names[0], self.url)
        stopped = asyncio.create_task(self._stop.wait())
        for ended in (await asyncio.wait([stopped, *self._upkeep], return_when=FIRST_COMPLETED))[0]:
            ended.result()

    async def _close(self) -> None:
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        if self.state.watch is not None:
            await self.state.watch.close()
        if self.state.session is not None:
            await self.state.session.close()
        if self.state.exporter is not None:
            await asyncio.to_thread(self.state.exporter.close)
        await self.state.renderer.close()
        self.state.pool.shutdown(wait=False, cancel_futures=True)


def _load(router: RouterConfig) -> tuple[Identity, Tokenizer, int]:
    """The last one: how many tokens the model can have."""
    folder = resolve_model(router.model, files=TOKENIZER_FILES)
    seed = seed_digest(hash_seed(router.cache_seed))
    identity = Identity(model_id(router.model), revision(folder), tokenizer_digest(folder), seed)
    return identity, Tokenizer.from_folder(folder, router.chat_template), read_max_positions(folder)


def _open_session(router: RouterConfig) -> aiohttp.ClientSession:
    allowed = AllowedReplicas(router.allow_replicas)
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=IDLE_SECONDS,
        socket_factory=_kept_alive_socket,
        resolver=AllowedResolver(allowed) if router.registry_is_believed else None,
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=router.connect_timeout),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _kept_alive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
