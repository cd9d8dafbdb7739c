"""A server process that lives, drains and ends in order: a first signal drains it, a second one ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterable
from functools import partial
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from quire.service.config import ServiceConfig
from quire.service.errors import ApiError, ServerFailed, not_ready
from quire.service.http.cancellation import Interruptible, Stoppable
from quire.service.http.freed_memory import give_freed_memory_back
from quire.service.http.protocol import BoundedHttpProtocol, bounded_protocol
from quire.service.http.websocket_protocol import OrderlyWebSocketProtocol
from quire.service.keys import KeyRing
from quire.service.metrics.loop_watch import LoopWatch

log = logging.getLogger("quire.service")

POLL_SECONDS = 0.1
PROBED_SECONDS = 2.0  # for which routers may learn that we are not ready any more: two of their probes
LISTENERS = 16  # of each address; uvloop takes one new connection from each in a turn of the loop


class Work(Protocol):
    """The work that a server does, as far as its end has to see to it."""

    draining: bool
    keys: KeyRing
    generations: set[Interruptible]  # a drain waits for these
    streams: set[Stoppable]  # but not for these
    loop_watch: LoopWatch


class OrderlyServer(uvicorn.Server):
    """Subclasses say what lives in it: `_run` until `_stop` is set, `_begin_drain` and last `_close`."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServiceConfig,
        work: Work,
    ) -> None:
        self._service_config = config
        self._protocol = bounded_protocol(config)
        self._work = work
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._life: asyncio.Task[None] | None = None
        self.exit_code = 0
        self._failure = ""  # what ended it
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                loop="auto",  # uvloop, where there is one
                http=self._protocol,
                ws=OrderlyWebSocketProtocol,
                ws_max_size=config.max_frame_bytes,
                ws_per_message_deflate=False,  # it would cost more than an event of a few bytes
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                log_level="warning",  # what else there is to say, Quire says in its own words
                timeout_keep_alive=60,
                timeout_graceful_shutdown=1,
            )
        )

    def serve_until_stopped(self) -> int:
        """Return the exit code, 0 after a signal. Raises ServerFailed for what it could not go on from."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._service_config.api_key_file is not None and in_main_thread:  # nobody else may take signals
            signal.signal(signal.SIGHUP, lambda *_: self.reload_soon())
        give_freed_memory_back()  # before there are other threads, each of which would take a heap of its own
        try:
            self.run()
        except SystemExit:  # uvicorn could not bind, and has said why
            config = self._service_config
            raise ServerFailed(f"cannot listen on {config.host}, port {config.port}") from None
        if self._failure:
            raise ServerFailed(self._failure)
        return self.exit_code

    @property
    def url(self) -> str:
        """Return where a browser on this machine reaches it, once it listens."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._service_config.host, self._service_config.host)
        port = self._service_config.port or self.servers[0].sockets[0].getsockname()[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _run(self) -> None:
        """Returns once `_stop` is set; what it raises ends the server."""
        await self._stop.wait()

    def _begin_drain(self) -> None:
        """Take no more requests from now on."""

    async def _close(self) -> None:
        """Close what is left: nothing runs any more."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        await self._listen_more(self._loop)
        self._work.loop_watch.start()
        self._life = self._loop.create_task(self._live())

    async def _listen_more(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen on copies of the sockets, too, which share their queues.

        Of 256 clients that come at once the last would else wait for 256 turns of a loop that is busy.
        """
        protocol = partial(
            self._protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for listener in [listener for server in self.servers for listener in server.sockets]:
            for _ in range(LISTENERS - 1):
                copy = socket.socket(fileno=os.dup(listener.fileno()))
                self.servers.append(
                    await loop.create_server(protocol, sock=copy, backlog=self.config.backlog)
                )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop_soon()

    def stop_soon(self) -> None:
        """Stop as a signal does; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._hurry)
        else:
            self.should_exit = True

    def reload_soon(self) -> None:
        """Have the file of keys read again; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reload)

    def _reload(self) -> None:
        """Read the keys again; whoever has begun goes on, with or without one."""
        try:
            self._work.keys.reload()
        except ValueError as error:
            log.error("the API keys stay as they were: %s", error)
            return
        log.info("the API keys were read again: %s", ", ".join(key.name for key in self._work.keys))

    def _hurry(self) -> None:
        (self._now if self._stop.is_set() else self._stop).set()

    async def _live(self) -> None:
        try:
            await self._run()
        except Exception as error:
            self.exit_code = 1
            self._failure = str(error)
            log.error("the server ends: %s", error)
        try:
            await self._drain()
            await self._close()
        except Exception:
            self.exit_code = 1
            log.exception("the server did not end in order")
        finally:
            self.should_exit = True

    async def _drain(self) -> None:
        """Running generations may end; what has not when the time is up gets its last event."""
        work = self._work
        work.draining = self._protocol.draining = True
        probed, began = self._is_probed(), asyncio.get_running_loop().time()
        self._begin_drain()
        _interrupt(work.streams, not_ready("the server is shutting down"))
        seconds = self._service_config.shutdown_timeout if self.exit_code == 0 else 1.0
        if work.generations:
            log.info(
                "finishing %s, up to %g s; another Ctrl-C or SIGTERM ends now",
                _answers(len(work.generations)),
                seconds,
            )
        await self._wait_for_generations(seconds)
        if work.generations:
            log.info("%s cut off", _answers(len(work.generations)))
        _interrupt(work.generations, not_ready("the server is shutting down"))
        await self._wait_for_generations(self._service_config.terminal_timeout)
        await self._wait_for_readers(began + seconds)
        if probed:
            await self._wait_for_routers(began + min(PROBED_SECONDS, seconds))

    def _is_probed(self) -> bool:
        """Return whether a router keeps connections here, on which it may send until it knows better."""
        kept = self.server_state.connections
        return any(each.is_probed for each in kept if isinstance(each, BoundedHttpProtocol))

    async def _wait_for_routers(self, until: float) -> None:
        """Leave routers time: a request that comes as its connection is closed cannot be sent elsewhere."""
        loop = asyncio.get_running_loop()
        left = until - loop.time()
        if left > 0:
            log.info("routers may learn of it for %.1f s; another Ctrl-C or SIGTERM ends now", left)
        while self.server_state.connections and loop.time() < until:
            if self._now.is_set():
                return
            await asyncio.sleep(POLL_SECONDS / 4)

    async def _wait_for_readers(self, until: float) -> None:
        """Wait until answers that are whole are read."""
        loop = asyncio.get_running_loop()
        while self._has_unsent() and loop.time() < until:
            if self._now.is_set():
                return
            await asyncio.sleep(POLL_SECONDS / 4)

    def _has_unsent(self) -> bool:
        kept = self.server_state.connections
        return any(each.has_unsent for each in kept if isinstance(each, BoundedHttpProtocol))

    async def _wait_for_generations(self, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        while self._work.generations and asyncio.get_running_loop().time() < until:
            if self._now.is_set() and seconds > self._service_config.terminal_timeout:
                return
            await asyncio.sleep(POLL_SECONDS / 4)


def _answers(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"


def _interrupt(work: Iterable[Stoppable], error: ApiError) -> None:
    for each in list(work):
        each.interrupt(error)
