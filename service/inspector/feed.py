"""The live map of blocks: asked of the engine at a bounded rate, and never while nobody watches."""

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
    NO_MOVES,
    PoolAnswer,
    PoolQuestion,
    PrefixAnswer,
    PrefixQuestion,
)
from quire.service.engine_client import Engine
from quire.service.errors import ApiError, engine_dead

PERIOD = 0.25  # seconds between two looks at the pool
PREFIX_PERIOD = 1.0  # and at its texts
ENGINE_SHARE = 0.02  # of the engine's time that looking may take
Past = tuple[int, list[msgspec.Raw]]
"""A version, and what leads to it."""

if TYPE_CHECKING:
    from quire.service.inspector.telling import Teller
    from quire.service.inspector.updates import BlockHistory, BlockUpdate


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

    The engine keeps its last moves, so there is a past to go back to even if nobody has watched.
    """

    def __init__(self, *, has_keys: bool = False) -> None:
        self._has_keys = has_keys
        self._secret = secrets.token_bytes(16)
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._history: BlockHistory | None = None
        self._teller: Teller | None = None
        self._end = NO_MOVES  # where the moves begin that are not told yet
        self._version = 0  # of the history
        self._newest = msgspec.Raw()  # what changed with it
        self._wanted: asyncio.Future[Past] | None = None  # what was before, for those who have asked
        self._error: ApiError | None = None
        self._prefixes: asyncio.Task[PrefixAnswer] | None = None

    async def watch(self, engine: Engine, *, past: bool = False) -> AsyncIterator[msgspec.Raw]:
        """Yield all there is, and then each change; with `past`, first what is known of the last minutes.

        Raises ApiError when the engine is gone.
        """
        if self._task is not None and self._error is not None:
            raise self._error
        self._watchers += 1
        seen, has_all, wanted = -1, False, None
        if past:
            wanted = self._wanted = self._wanted or asyncio.get_running_loop().create_future()
        if self._task is None:
            self._error = None
            self._task = asyncio.create_task(self._look(engine), name="quire-block-feed")
        try:
            if wanted is not None:
                seen, events = await asyncio.shield(wanted)
                has_all = True
                for event in events:
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
                    yield _encode(self._history.full())
        finally:
            self._watchers -= 1
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = self._history = self._teller = self._wanted = None

    async def _look(self, engine: Engine) -> None:
        wanted = None
        try:
            while True:
                wanted, self._wanted = self._wanted, None
                exact = wanted is not None or self._teller is None
                since = 0 if wanted is not None else NO_MOVES if exact else self._end
                answer = await engine.ask(PoolQuestion(since, exact))
                if isinstance(answer, PoolAnswer):
                    await self._take(answer, wanted)
                    await asyncio.sleep(max(PERIOD, answer.seconds / ENGINE_SHARE))
                else:
                    await asyncio.sleep(PERIOD)
        except EngineDeadError as error:
            self._error = engine_dead(str(error))
            for each in (wanted, self._wanted):
                if each is not None and not each.done():
                    each.set_exception(self._error)
            self._tell()

    async def _take(self, answer: PoolAnswer, wanted: asyncio.Future[Past] | None = None) -> None:
        """Tell those who watch what is different, and those who have asked what was before."""
        from quire.service.inspector.telling import Teller, tell_past  # a server listens before it has numpy
        from quire.service.inspector.updates import BlockHistory

        history, teller, exact = self._history, self._teller, answer.exact
        past = None
        if wanted is not None and exact is not None:
            past = await asyncio.to_thread(tell_past, answer, exact, self._name_key)
        lost = max(0, answer.begin - self._end)  # numbers that were not kept until now
        moves = teller.tell(answer, self._end) if teller is not None and not lost else []
        if history is None or len(history.last.states) != len(answer.states):
            history = BlockHistory(answer, self._name_key)
            self._version += 2  # nobody has what came before
        else:
            self._newest = _encode(history.advance(answer, moves, lost))
            self._version += 1
        if past is not None:
            teller, history, events = past
        else:
            events = [_encode(history.full())]
            if exact is not None:
                teller = Teller(answer, exact)
            elif lost:
                teller = None
        self._teller, self._history, self._end = teller, history, answer.end
        if wanted is not None and not wanted.done():
            wanted.set_result((self._version, events))
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
            raise engine_dead(str(error)) from None

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


def _encode(update: BlockUpdate) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(update))


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
