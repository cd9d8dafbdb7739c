"""A real engine core without a model, stepped in the service's own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

from quire.engine.config import EngineInfo, Progress, RegistryReport, StepStats
from quire.engine.core import EngineCore
from quire.engine.messages import Abort, EndSample, Output, Request, SamplingParams
from quire.engine.records import RequestRecord


class CoreStream:
    def __init__(self, engine: CoreEngine, request: Request) -> None:
        self.request_id = request.id
        self.listener: Callable[[list[Output]], None] | None = None
        self._engine = engine

    def listen(self, listener: Callable[[list[Output]], None]) -> None:
        self.listener = listener

    def abort(self) -> None:
        self.listener = None
        self._engine.core.handle(Abort(self.request_id))
        self._engine.go_on()

    def end_sample(self, index: int) -> None:
        self._engine.core.handle(EndSample(self.request_id, index))


class CoreEngine:
    """Steps once a turn of the loop while there is work. `paused`: it only takes requests."""

    def __init__(self, core: EngineCore, info: EngineInfo) -> None:
        core.clock = core.scheduler.state.clock = core.scheduler.blocks.history.clock = time.monotonic
        self.core = core
        self.info: EngineInfo | None = info
        self.state: Literal["loading", "ready", "dead"] = "ready"
        self.error: str | None = None
        self.on_stats: Callable[[StepStats], None] | None = None
        self.on_registry: Callable[[RegistryReport], None] | None = None
        self.on_record: Callable[[RequestRecord], None] | None = None
        self.paused = False
        self._streams: dict[int, CoreStream] = {}
        self._changed = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None

    def add(
        self, prompt: list[int], params: SamplingParams, cache_salt: str = "", owner: str = ""
    ) -> CoreStream:
        request = Request(len(self._streams), prompt, params, time.monotonic(), cache_salt, owner)
        self.core.add(request)
        stream = self._streams[request.id] = CoreStream(self, request)
        self._changed.set()
        self.go_on()
        return stream

    def go_on(self) -> None:
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self.core.has_work or self.core.scheduler.state.records:
            await asyncio.sleep(0)
            if not self.paused:
                self.step()

    def step(self) -> None:
        outputs = list(self.core.step())
        for record in self.core.records:
            if self.on_record is not None:
                self.on_record(record)
        for output in outputs:
            listener = self._streams[output.request_id].listener
            if listener is not None:
                listener([output])
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that comes with a request or a step."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def until_queued(self, count: int) -> None:
        await self.until(lambda: len(self._streams) >= count)

    async def watch_progress(self) -> AsyncIterator[Progress]:
        for progress in ():
            yield progress

    def drain(self) -> None:
        return

    def seconds_since_progress(self) -> float:
        return 0.0

    async def stop(self) -> None:
        return
