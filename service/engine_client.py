"""The engine as the service sees it; `quire.engine.client.AsyncEngine` is one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol

from quire.engine.config import EngineInfo, Progress, RegistryReport, StepStats
from quire.engine.inspection.messages import Answer, Question
from quire.engine.messages import Output, PoolingParams, SamplingParams
from quire.engine.records import RequestRecord


class RequestStream(Protocol):
    @property
    def request_id(self) -> int: ...

    def listen(self, listener: Callable[[list[Output]], None]) -> None: ...

    def abort(self) -> None: ...

    def end_sample(self, index: int) -> None: ...


class Engine(Protocol):
    on_stats: Callable[[StepStats], None] | None
    on_registry: Callable[[RegistryReport], None] | None
    on_record: Callable[[RequestRecord], None] | None

    @property
    def state(self) -> Literal["loading", "ready", "dead"]: ...

    @property
    def error(self) -> str | None: ...

    @property
    def info(self) -> EngineInfo | None: ...

    def watch_progress(self) -> AsyncIterator[Progress]: ...

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        cache_salt: str = "",
        owner: str = "",
        pooling: PoolingParams | None = None,
    ) -> RequestStream: ...

    async def ask(self, question: Question) -> Answer | None: ...

    def drain(self) -> None: ...

    def seconds_since_progress(self) -> float: ...

    async def stop(self) -> None: ...
