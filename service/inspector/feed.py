"""The live map of blocks: asked of the engine at a bounded rate, seldom while nobody watches."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec

from quire.engine.config import StepStats
from quire.engine.errors import EngineDeadError
from quire.engine.inspection.messages import (
    GlanceQuestion,
    PoolAnswer,
    PoolQuestion,
    PrefixAnswer,
    PrefixQuestion,
)
from quire.service.engine_client import Engine
from quire.service.errors import ApiError
from quire.service.inspector.past import Past

PERIOD = 0.25  # seconds between two looks at the pool
PREFIX_PERIOD = 1.0  # and at its texts
ENGINE_SHARE = 0.02  # of the engine's time that looking may take
GLANCE_PERIOD = 5.0  # seconds between two looks while nobody watches
GLANCE_SHARE = 0.002  # of the engine's time that these may take

if TYPE_CHECKING:
    from quire.service.inspector.updates import BlockHistory


class BlockCounts(msgspec.Struct, frozen=True):
    """How many blocks there are of each kind: all that the chat page's small map shows."""

    active: int
    cached: int
    free: int
    block_size: int
    host_active: int
    host_cached: int
    host_free: int


class BlockFeed:
    """One look at the pool for all who watch. Who reads slowly gets the whole map again, and no backlog.

    Between watchers it glances, where blocks have changed, so that there is a past to go back to.
    """

    def __init__(self, *, has_keys: bool = False) -> None:
        self._has_keys = has_keys
        self._secret = secrets.token_bytes(16)
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._history: BlockHistory | None = None
        self._past = Past()
        self._version = 0  # of the history
        self._newest = msgspec.Raw()  # what changed with it
        self._error: ApiError | None = None
        self._prefixes: asyncio.Task[PrefixAnswer] | None = None

    async def watch(self, engine: Engine, *, past: bool = False) -> AsyncIterator[msgspec.Raw]:
        """Yield all there is, and then each change; with `past`, first what is known of the last minutes.

        Raises ApiError when the engine is gone.
        """
        self._watchers += 1
        seen, has_all = -1, False
        if self._task is None:
            seen = self._version  # a glance may be old
            self._error = None
            self._task = asyncio.create_task(self._look(engine), name="quire-block-feed")
        try:
            if past and self._history is not None:
                seen, has_all = self._version, True
                for event in self._past.events():
                    yield event
            while True:
                while self._history is None or self._version == seen:
                    if self._error is not None:
                        raise self._error
                    await self._changed.wait()
                is_next, seen = has_all and seen == self._version - 1, self._version
                has_all = True
                if is_next:
                    yield self._newest
                else:
                    yield msgspec.Raw(msgspec.json.encode(self._history.full()))
        finally:
            self._watchers -= 1
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def glance(self, engine: Engine, stats: Callable[[], StepStats | None]) -> None:
        """Look at the pool now and then while nobody watches, as long as blocks come and go."""
        before = None
        while True:
            pause = GLANCE_PERIOD
            now = _moved(stats())
            if self._task is None and now != before and engine.state == "ready":
                before = now
                try:
                    answer = await engine.ask(GlanceQuestion())
                except EngineDeadError:
                    return
                if isinstance(answer, PoolAnswer):
                    self._take(answer)
                    pause = max(pause, answer.seconds / GLANCE_SHARE)
            await asyncio.sleep(pause)

    async def _look(self, engine: Engine) -> None:
        try:
            while True:
                answer = await engine.ask(PoolQuestion())
                if isinstance(answer, PoolAnswer):
                    self._take(answer)
                    await asyncio.sleep(max(PERIOD, answer.seconds / ENGINE_SHARE))
                else:
                    await asyncio.sleep(PERIOD)
        except EngineDeadError as error:
            self._error = ApiError(503, f"the engine died: {error}", code="engine_dead")
            self._tell()

    def _take(self, answer: PoolAnswer) -> None:
        history = self._history
        if history is None or len(history.last.states) != len(answer.states):
            from quire.service.inspector.updates import BlockHistory  # a server listens before it has numpy

            history = self._history = BlockHistory(answer, self._name_key)
            self._past.clear()
            self._version += 2  # nobody has what came before
        else:
            self._newest = msgspec.Raw(msgspec.json.encode(history.advance(answer)))
            self._version += 1
        self._past.add(answer.at, self._newest, lambda: msgspec.Raw(msgspec.json.encode(history.full())))
        self._tell()

    def _name_key(self, salt: str) -> str:
        """Return what to call the key of a salt: nobody learns by it who else has one."""
        if not self._has_keys:
            return ""
        return "key-" + hashlib.blake2s(salt.encode(), key=self._secret).hexdigest()[:6]

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def prefixes(self, engine: Engine) -> PrefixAnswer:
        """Return the cache's texts, which are not looked at more often than they may be.

        Raises ApiError, 503 when the engine is gone.
        """
        if self._prefixes is None:
            self._prefixes = asyncio.create_task(self._find_prefixes(engine))
        try:
            return await asyncio.shield(self._prefixes)
        except EngineDeadError as error:
            raise ApiError(503, f"the engine died: {error}", code="engine_dead") from None

    async def _find_prefixes(self, engine: Engine) -> PrefixAnswer:
        pause = PREFIX_PERIOD
        try:
            answer = await engine.ask(PrefixQuestion())
            if not isinstance(answer, PrefixAnswer):
                raise ApiError(500, "the engine could not tell which texts are cached", code="internal_error")
            pause = max(PREFIX_PERIOD, answer.seconds / ENGINE_SHARE)
            return answer
        finally:
            asyncio.get_running_loop().call_later(pause, self._forget_prefixes)

    def _forget_prefixes(self) -> None:
        self._prefixes = None


def _moved(stats: StepStats | None) -> tuple[int, ...]:
    """Return what changes whenever blocks do."""
    if stats is None:
        return ()
    device = stats.block_allocations, stats.block_evictions, stats.active_blocks, stats.block_references
    return *device, stats.swap_out_blocks, stats.swap_in_blocks


async def watch_counts(stats: Callable[[], StepStats | None], block_size: int) -> AsyncIterator[BlockCounts]:
    """Yield the numbers of the last step whenever they have changed; the engine is not asked."""
    last = None
    while True:
        step = stats()
        if step is not None:
            counts = BlockCounts(
                active=step.active_blocks,
                cached=step.cached_blocks,
                free=step.free_blocks,
                block_size=block_size,
                host_active=step.host_active_blocks,
                host_cached=step.host_cached_blocks,
                host_free=step.host_free_blocks,
            )
            if counts != last:
                last = counts
                yield counts
        await asyncio.sleep(PERIOD)
