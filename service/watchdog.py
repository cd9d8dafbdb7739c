"""Sees whether the engine makes steps while it has work; what waits for one that is stalled ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from quire.service.engine_client import Engine
from quire.service.errors import ENGINE_STALLED, ApiError

log = logging.getLogger("quire.service")

# Steps of a large model's long prompts are that slow on a CPU; on a GPU only a kernel's first compilation is.
DEFAULT_TIMEOUT_ON_CPU = 60.0
DEFAULT_TIMEOUT = 10.0
_LOOK_SECONDS = 0.1
_PAUSE_SECONDS = 1.0  # between two looks: this process, too, was stopped, and cannot tell what the engine did
_RETRY_SECONDS = 5


class Failable(Protocol):
    def fail(self, error: ApiError) -> None: ...


class Watchdog:
    """The engine is stalled when it has had work for `timeout` seconds without a step, until it makes one.

    None: as long as steps hardly ever take on the engine's device.
    """

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._stall: str | None = None  # said to clients
        self._last_look = float("inf")
        self._lenient_until = float("-inf")
        self.generations: set[Failable] = set()  # that the engine works on

    def check(self) -> None:
        """Raises ApiError 503 while the engine is stalled."""
        if self._stall is not None:
            raise _stalled(self._stall)

    async def watch(self, engine: Engine) -> None:
        """Looks again and again. Until it is cancelled."""
        while True:
            self.look(engine)
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self, engine: Engine) -> None:
        """Ends all generations if the engine is stalled."""
        now, seconds, timeout = self._clock(), engine.seconds_since_progress(), self._timeout
        if timeout is None:
            on_cpu = engine.info is not None and engine.info.device == "cpu"
            timeout = DEFAULT_TIMEOUT_ON_CPU if on_cpu else DEFAULT_TIMEOUT
        was_stalled = self._stall is not None
        if now - self._last_look > _PAUSE_SECONDS and not was_stalled:
            self._lenient_until = now + timeout
        self._last_look = now
        if seconds > timeout and now >= self._lenient_until:
            self._stall = (
                f"the engine has made no step for {seconds:.1f} s and is taken to be stuck: try again later; "
                f"where steps may take so long, raise --stall-timeout, which is {timeout:g} s"
            )
            if not was_stalled:
                log.error("the engine is stalled, %d requests end: %s", len(self.generations), self._stall)
            for generation in list(self.generations):
                generation.fail(_stalled(self._stall))
        else:
            self._stall = None
            if was_stalled:
                log.warning("the engine makes steps again")


def _stalled(message: str) -> ApiError:
    return ApiError(503, message, code=ENGINE_STALLED, retry_after=_RETRY_SECONDS)
