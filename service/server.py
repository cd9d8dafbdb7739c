"""The server process: binds at once, then starts the engine, and ends in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from service.app import create_app
from service.config import ServiceConfig
from service.engine_client import Engine
from service.errors import ApiError, not_ready
from service.http_protocol import bounded_protocol
from service.interruption import Interruptible
from service.state import ServerState

if TYPE_CHECKING:
    from service.tokenizer import Tokenizer

log = logging.getLogger("quire.service")

_POLL_SECONDS = 0.1


def serve(
    config: ServiceConfig,
    start_engine: Callable[[], Awaitable[Engine]],
    load_tokenizer: Callable[[], Tokenizer],
) -> int:
    """Serves until a signal or the engine's death. Returns the exit code: 0 after a signal, else 1.

    Both callables are called after the port is bound: `start_engine` in the event loop (it returns as soon
    as there is an engine, which may still be loading), `load_tokenizer` in a thread.
    """
    server = QuireServer(config, start_engine, load_tokenizer)
    try:
        server.run()
    except SystemExit:  # uvicorn could not bind, and has said why
        return 1
    return server.exit_code


class QuireServer(uvicorn.Server):
    def __init__(
        self,
        config: ServiceConfig,
        start_engine: Callable[[], Awaitable[Engine]],
        load_tokenizer: Callable[[], Tokenizer],
    ) -> None:
        self._service_config = config
        self._start_engine = start_engine
        self._load_tokenizer = load_tokenizer
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._life: asyncio.Task[None] | None = None
        self.exit_code = 0
        self.state = ServerState(config)
        super().__init__(
            uvicorn.Config(
                create_app(self.state),
                host=config.host,
                port=config.port,
                loop="auto",  # uvloop, where there is one
                http=bounded_protocol(config),
                ws="none",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=1,
            )
        )

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup()
        self._loop = asyncio.get_running_loop()
        self._life = self._loop.create_task(self._live())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        self.stop_soon()

    def stop_soon(self) -> None:
        """As a signal does; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._hurry)
        else:
            self.should_exit = True

    def _hurry(self) -> None:
        (self._now if self._stop.is_set() else self._stop).set()

    async def _live(self) -> None:
        start = asyncio.create_task(self._start())
        try:
            await self._until_stopped(start)
        except Exception as error:
            self.exit_code = 1
            log.error("the server ends: %s", error)
        start.cancel()
        try:
            await self._drain()
            if self.state.engine is not None:
                await self.state.engine.stop()
        except Exception:
            self.exit_code = 1
            log.exception("the server did not end in order")
        finally:
            self.state.pool.shutdown(wait=False, cancel_futures=True)
            self.should_exit = True

    async def _start(self) -> None:
        state = self.state
        state.set_engine(await self._start_engine())
        loop = asyncio.get_running_loop()
        state.tokenizer = await loop.run_in_executor(state.pool, self._load_tokenizer)
        await loop.run_in_executor(state.pool, import_module, "service.exposition")

    async def _until_stopped(self, start: asyncio.Task[None]) -> None:
        """Raises RuntimeError if the engine dies, and what `start` raises."""
        while not self._stop.is_set():
            if start.done():
                start.result()
            engine = self.state.engine
            if engine is not None and engine.state == "dead":
                raise RuntimeError(f"the engine died: {engine.error}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _drain(self) -> None:
        """Running generations may end; what has not when the time is up gets its last event."""
        state = self.state
        state.draining = True
        if state.engine is not None:
            state.engine.drain()
        _interrupt(state.streams, not_ready("the server is shutting down"))
        seconds = self._service_config.shutdown_timeout if self.exit_code == 0 else 1.0
        await self._wait_for_generations(seconds)
        _interrupt(state.generations, not_ready("the server is shutting down"))
        await self._wait_for_generations(self._service_config.terminal_timeout)

    async def _wait_for_generations(self, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        while self.state.generations and asyncio.get_running_loop().time() < until:
            if self._now.is_set() and seconds > self._service_config.terminal_timeout:
                return
            await asyncio.sleep(_POLL_SECONDS / 4)


def _interrupt(work: set[Interruptible], error: ApiError) -> None:
    for each in list(work):
        each.interrupt(error)
