"""A request for vectors while the engine works on it: its prompts, and what comes of each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from msgspec.structs import replace

from quire.engine.errors import EngineDeadError, FieldError
from quire.engine.messages import POOLED, FinishReason, Output, PoolingParams
from quire.service.admission import Admission
from quire.service.engine_client import Engine, RequestStream
from quire.service.errors import ApiError, engine_dead, not_ready, refused
from quire.service.explain.times import RequestTimes, Status
from quire.service.http.access_line import Cost
from quire.service.text.pooled_prompt import PooledPrompt


@dataclass(slots=True)
class _Prompt:
    index: int
    num_tokens: int
    stream: RequestStream


class PooledPrompts:
    """`complete` them, which gives their vectors, and always `close`.

    Raises ApiError from the constructor if a prompt can never fit.
    """

    def __init__(
        self,
        admission: Admission,
        engine: Engine,
        prompts: list[PooledPrompt],
        pooling: PoolingParams,
        cache_salt: str,
        times: RequestTimes,
    ) -> None:
        self.times = times
        self.arrival = time.monotonic()
        self.num_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self._admission = admission
        self._engine = engine
        self._vectors = [b""] * len(prompts)
        self._unfinished: dict[int, _Prompt] = {}  # by the number that it has in the engine
        self._failed: ApiError | None = None
        self._end_reason: FinishReason = "abort"  # of prompts that are unfinished when it is closed
        self._end = asyncio.get_running_loop().create_future()
        admission.queue.check(len(prompts), self.num_tokens)
        try:
            for index, prompt in enumerate(prompts):
                self._add(engine, index, prompt, pooling, cache_salt)
        except BaseException:
            self.close()
            raise
        self.engine_requests = list(self._unfinished)
        times.queued, times.engine_requests = self.arrival, self.engine_requests
        times.prompt_tokens = self.num_tokens
        admission.past_requests.add(times)
        admission.watchdog.generations.add(self)

    def _add(
        self, engine: Engine, index: int, prompt: PooledPrompt, pooling: PoolingParams, cache_salt: str
    ) -> None:
        tokens, unpooled = prompt
        params = replace(pooling, unpooled=unpooled) if unpooled else pooling
        try:
            stream = engine.add(tokens, POOLED, cache_salt, self.times.tenant, params)
        except FieldError as error:
            raise refused(error) from None
        except EngineDeadError as error:
            raise not_ready(f"the engine died: {error}") from None
        self._unfinished[stream.request_id] = _Prompt(index, len(tokens), stream)
        self._admission.queue.enter(len(tokens))
        stream.listen(self._arrive)

    async def complete(self) -> list[bytes]:
        """Wait for all vectors, float32 each. Raises ApiError if the engine fails, or `fail` is called."""
        await self._end
        if self._failed is not None:
            raise self._failed
        return self._vectors

    def fail(self, error: ApiError) -> None:
        """Abort what is unfinished, and have `complete` raise `error`."""
        if not self._end.done():
            self._failed, self._end_reason = error, "error"
            self._end.set_result(None)
            for prompt in self._unfinished.values():
                prompt.stream.abort()

    def _arrive(self, outputs: list[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            if output.finish_reason == "abort":
                self.fail(not_ready("the server is shutting down"))
            elif output.vector is None and self._engine.state == "dead":
                self.fail(engine_dead(output.error, 500))
            elif output.vector is None:
                message = f"the engine failed on this request: {output.error}"
                self.fail(ApiError(500, message, code="engine_error"))
            elif not self._end.done():
                self._take(output, output.vector, now)
        if not self._unfinished and not self._end.done():
            self.times.finished = self.times.text_ready = now
            self._end.set_result(None)

    def _take(self, output: Output, vector: bytes, now: float) -> None:
        prompt = self._unfinished.pop(output.request_id)
        self._vectors[prompt.index] = vector
        self._admission.queue.start(prompt.num_tokens)
        metrics, request_id = self._admission.metrics, self.times.request_id
        self.times.cached_tokens += output.cached_tokens
        metrics.prompt_tokens += prompt.num_tokens
        metrics.cached_tokens += output.cached_tokens
        metrics.cached_host_tokens += output.cached_host_tokens
        metrics.finished["stop"] += 1
        metrics.request_latency.observe(now - self.arrival, 1, request_id)
        if output.queue_seconds is not None:
            metrics.queue_time.observe(output.queue_seconds, 1, request_id)

    def close(self) -> None:
        """Abort what is unfinished. Idempotent."""
        self._admission.watchdog.generations.discard(self)
        if self.times.ended is None:
            ended: Status = "failed" if self._end_reason == "error" else "aborted"
            done = len(self._vectors) - len(self._unfinished)
            self.times.finish_reasons = ["stop"] * done + [self._end_reason] * len(self._unfinished)
            self._admission.past_requests.end(self.times, ended if self._unfinished else "finished")
        for prompt in self._unfinished.values():
            prompt.stream.abort()
            self._admission.metrics.finished[self._end_reason] += 1
            self._admission.queue.leave(prompt.num_tokens)
        self._unfinished = {}

    def cost(self) -> Cost:
        """Return what the log tells of it."""
        return Cost(self.num_tokens, self.times.cached_tokens, 0, None)
