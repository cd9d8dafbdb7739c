"""A replica: the server of `quire serve`, as one of Ray's actors."""

from __future__ import annotations

import asyncio
import socket
import threading
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import cast

import aiohttp
import ray
from starlette.types import ASGIApp

from quire.engine.logs import configure_logging
from quire.ray.leases import Leases
from quire.ray.settings import settings_at
from quire.service.commands.serve import make_server
from quire.service.errors import ServerFailed

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 10.0


class Replica:
    """It listens at a port of its own, in a thread of its own; Ray sees leases, health and end."""

    async def __init__(self, arguments: Namespace) -> None:  # type: ignore[misc]  # Ray awaits it
        """Return once it is ready. Raises RuntimeError with what it could not start from."""
        configure_logging(arguments.log_format, arguments.log_level)
        host = ray.util.get_node_ip_address()
        port = _free_port(host)
        self.url = f"http://{host}:{port}"
        self._server = make_server(*settings_at(arguments, host, port))
        self._leases = Leases(cast(ASGIApp, self._server.config.app))
        self._server.config.app = self._leases
        self._failure = "it has ended"
        self._thread = threading.Thread(target=self._serve, name="quire-server", daemon=True)
        self._thread.start()
        while True:
            if await self._answers("/ready"):
                return
            await asyncio.sleep(_POLL_SECONDS)

    def record_replica_metadata(self) -> dict[str, str | int]:
        """Return what Ray tells routers of it: where it is, and how many KV blocks it has, in both tiers."""
        engine = self._server.state.engine
        info = None if engine is None else engine.info
        return {"url": self.url, "blocks": info.num_blocks + info.num_host_blocks if info else 0}

    async def peek(self, wish: str) -> str:
        """Do nothing: whoever asks wants to see which replicas there are."""
        return self.url

    async def lease(self, wish: str) -> AsyncIterator[tuple[str, bytes]]:
        """Yield where to ask, and with which header; the call lasts until that request is answered."""
        with self._leases.lent() as lease:
            yield self.url, lease.token
            await self._leases.wait(lease)

    async def check_health(self) -> None:
        """Raises RuntimeError if Ray must start it anew."""
        if not await self._answers("/health"):
            raise RuntimeError("the server says that it is not well, or nothing")

    async def __del__(self) -> None:
        """End in order, once Ray has no more requests here."""
        self._server.stop_soon()
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        try:
            self._server.serve_until_stopped()
        except ServerFailed as error:
            self._failure = str(error)

    async def _answers(self, path: str) -> bool:
        """Raises RuntimeError if there is no server any more."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the server ends: {self._failure}")
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self.url + path) as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
