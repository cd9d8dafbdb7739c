"""The ingress: what `quire route` is, between Ray's proxy and Ray's replicas.

Requests go from here to the replicas' own ports, so that streams pass through byte for byte, WebSockets too,
and a stream whose replica died ends with its last event, which Ray's proxy alone would not send.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from quire.commands.serve import read_settings
from quire.engine.config import BLOCK_SIZE
from quire.engine.logs import configure_logging
from quire.ray.affinity import PrefixAffinity
from quire.ray.outside import Outside
from quire.ray.routing import RayState
from quire.service.router.app import create_app
from quire.service.router.config import RouterConfig
from quire.service.router.reading import start_reading, start_reading_prompts, stop_reading
from quire.service.router.sessions import open_session

CONNECT_SECONDS = 2.0


class Ingress:
    """One process of it. Each follows the registry by itself."""

    async def __init__(self, handle: Any, arguments: Namespace) -> None:  # type: ignore[misc]  # Ray awaits it
        """`handle`: of the replicas' deployment."""
        configure_logging(arguments.log_format, arguments.log_level)
        settings = read_settings(arguments)
        service = replace(
            settings.service,
            host="0.0.0.0" if arguments.insecure else settings.service.host,
            keep_alive=86400.0,  # the replicas' own comments pass through
        )
        self._state = RayState(service, handle)
        self._state.session = open_session(CONNECT_SECONDS)
        self._watching: asyncio.Task[None] | None = None
        if settings.registry is not None:
            reading = RouterConfig(
                model=settings.engine.model,
                lora=settings.engine.lora,
                redis_url=settings.registry.redis_url,
                cache_seed=settings.engine.cache_seed or "",
                chat_template=settings.chat_template,
            )
            watching = await start_reading(self._state, reading, self._state.register)
            self._watching = asyncio.create_task(watching)
        elif settings.engine.enable_prefix_caching:
            engine = settings.engine
            await start_reading_prompts(self._state, engine.model, engine.lora, settings.chat_template)
            self._state.affinity = PrefixAffinity(settings.engine.block_size or BLOCK_SIZE)
        await self._state.everybody()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Outside(create_app(self._state))

    async def __del__(self) -> None:
        """End, once Ray has no more requests here."""
        self._state.draining = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._state.close()
        if self._state.session is not None:
            await self._state.session.close()
        await stop_reading(self._state)
