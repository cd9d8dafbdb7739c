"""The server of one engine: the port is bound, then the engine and the tokenizer come up behind it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import TYPE_CHECKING

from quire.service.app import create_app
from quire.service.config import ServiceConfig
from quire.service.engine_client import Engine
from quire.service.http.lifecycle import POLL_SECONDS, OrderlyServer
from quire.service.metrics.operator_line import OperatorLine
from quire.service.state import ServerState

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer

# Imported once the port is bound, which does not wait for them, and before requests are taken: an import
# holds up the event loop.
LATE_IMPORTS = (
    "quire.service.metrics.exposition",
    "llguidance",
    "quire.engine.arrays",
    "quire.service.api.lab",
)


def serve(
    config: ServiceConfig,
    start_engine: Callable[[], Awaitable[Engine]],
    load_tokenizer: Callable[[], Tokenizer],
) -> int:
    """Serves until a signal. Returns the exit code, 0; raises ServerFailed, as when the engine dies.

    Both callables are called after the port is bound: `start_engine` in the event loop (it returns as soon
    as there is an engine, which may still be loading), `load_tokenizer` in a thread.
    """
    return QuireServer(config, start_engine, load_tokenizer).serve_until_stopped()


class QuireServer(OrderlyServer):
    def __init__(
        self,
        config: ServiceConfig,
        start_engine: Callable[[], Awaitable[Engine]],
        load_tokenizer: Callable[[], Tokenizer],
    ) -> None:
        self._start_engine = start_engine
        self._load_tokenizer = load_tokenizer
        self._watchers: list[asyncio.Task[None]] = []
        self.state = ServerState(config)
        super().__init__(create_app(self.state), config, self.state)

    async def _run(self) -> None:
        """Raises RuntimeError if the engine dies, and what its start or the tokenizer's raises."""
        start = asyncio.create_task(self._start())
        try:
            while not self._stop.is_set():
                if start.done():
                    start.result()
                engine = self.state.engine
                if engine is not None and engine.state == "dead":
                    raise RuntimeError(_death(engine.error or "it says nothing"))
                await asyncio.sleep(POLL_SECONDS)
        finally:
            start.cancel()

    async def _start(self) -> None:
        state = self.state
        engine = await self._start_engine()
        state.set_engine(engine)
        loop = asyncio.get_running_loop()
        # To the end: a drain needs steps, too.
        self._watchers.append(loop.create_task(state.watchdog.watch(engine)))
        telling = OperatorLine(state.metrics).keep_telling(lambda: engine.info)
        self._watchers.append(loop.create_task(telling))
        tokenizer = await loop.run_in_executor(state.pool, self._load_tokenizer)
        if tokenizer.chat_template is not None:
            await state.renderer.start(tokenizer.chat_template)
        for late in LATE_IMPORTS:
            await loop.run_in_executor(state.pool, import_module, late)
        state.tokenizer = tokenizer
        # Requests that go well leave nothing for it to find. What is there now stays: looking
        # through it again and again would hold up all streams for tens of milliseconds.
        gc.collect()
        gc.freeze()

    def _begin_drain(self) -> None:
        if self.state.engine is not None:
            self.state.engine.drain()

    async def _close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        try:
            if self.state.engine is not None:
                await self.state.engine.stop()
        finally:
            self.state.lab_pools.close()
            if self.state.exporter is not None:
                await asyncio.to_thread(self.state.exporter.close)
            await self.state.grammar_trials.close()
            await self.state.renderer.close()
            await self.state.responses.close()
            self.state.pool.shutdown(wait=False, cancel_futures=True)


def _death(error: str) -> str:
    """Return why the server ends. A setting that cannot be is told as it is: nothing has died of it."""
    kind, _, words = error.partition(": ")
    return words if kind == "ValueError" else f"the engine died: {error}"
