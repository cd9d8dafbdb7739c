"""The state that endpoints share: engine and tokenizer once they are there, who is served, and limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from quire.engine.config import EngineInfo
from quire.service.admission import Admission, QueueLimits
from quire.service.answer.conversations import ConversationMemory
from quire.service.answer.kept_responses import KeptResponses
from quire.service.answer.redis_responses import RedisResponses
from quire.service.answer.resumption.recordings import Recordings
from quire.service.answer.stored_responses import ResponseStore
from quire.service.config import ServiceConfig
from quire.service.engine_client import Engine
from quire.service.errors import ApiError, no_room, not_ready, too_large
from quire.service.explain.past_requests import PastRequests
from quire.service.explain.times import RequestTimes
from quire.service.explain.trace_context import TraceContext
from quire.service.http.cancellation import Interruptible, Stoppable
from quire.service.inspector.feed import BlockFeed
from quire.service.inspector.lab_pools import LabPools
from quire.service.keys import KeyRing
from quire.service.metrics.counts import Metrics
from quire.service.metrics.loop_watch import LoopWatch
from quire.service.text.grammar_trials import GrammarTrials
from quire.service.text.sizes import utf8_size
from quire.service.text.template_renderer import TemplateRenderer
from quire.service.tracing.exporter import SpanExporter
from quire.service.tracing.otlp import request_spans
from quire.service.watchdog import Watchdog

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from quire.service.text.tokenizer import Tokenizer

# In bytes of text or in tokens:
_INLINE = 2048  # so much takes about as long as a trip to another thread and back
_PORTION = 64 << 10  # of many prompts, before others have their turn

T = TypeVar("T")
_LOADING_RETRY_SECONDS = 5


class ServerState:
    """Lives as long as the process. `engine` and `tokenizer` are None until they are up."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.keys = KeyRing(config.api_keys, config.api_key_file)
        self.metrics = Metrics(config.served_model_names[0])
        self.created = int(time.time())
        self.engine: Engine | None = None
        self.tokenizer: Tokenizer | None = None
        self.engine_set = asyncio.Event()
        self.draining = False
        self.generations: set[Interruptible] = set()  # a drain waits for these
        self.streams: set[Stoppable] = set()  # but not for these (/startup)
        self.recordings = Recordings(config, self.keys, self.generations)
        self.conversations = ConversationMemory(config.max_conversations_bytes)
        shared = None
        if config.response_store == "redis" and config.redis_url is not None:
            shared = RedisResponses(config.redis_url, config.response_ttl, config.max_stored_bytes)
        self.responses = KeptResponses(ResponseStore(config.max_stored_bytes), shared, self.metrics)
        self.loop_watch = LoopWatch()
        self.lab_pools = LabPools()
        self.blocks = BlockFeed(has_keys=config.asks_for_keys)
        self.pool = ThreadPoolExecutor(2, "tokenizer")
        self.queue = QueueLimits(config)
        self.watchdog = Watchdog(config.stall_timeout)
        self.past_requests = PastRequests()
        self.exporter: SpanExporter | None = None
        if config.otlp_endpoint is not None:
            self.exporter = SpanExporter(config.otlp_endpoint, "quire")
            self.past_requests.on_whole = self._export
        self.grammar_trials = GrammarTrials()
        self.renderer = TemplateRenderer(config.max_prompt_bytes)

    def set_engine(self, engine: Engine) -> None:
        engine.on_stats = self.metrics.step
        engine.on_registry = self.metrics.registry_report
        engine.on_record = self.past_requests.record
        self.engine = engine
        self.engine_set.set()

    @property
    def ready(self) -> bool:
        return (
            not self.draining
            and self.tokenizer is not None
            and self.engine is not None
            and self.engine.state == "ready"
        )

    def serving(self) -> tuple[Engine, Tokenizer, EngineInfo]:
        """Raises ApiError 503 unless requests can be served."""
        engine, tokenizer = self.engine, self.tokenizer
        if self.draining:
            raise not_ready("the server is shutting down", _LOADING_RETRY_SECONDS)
        if engine is not None and engine.state == "dead":
            raise not_ready(f"the engine died: {engine.error}", _LOADING_RETRY_SECONDS)
        info = None if engine is None or engine.state != "ready" else engine.info
        if engine is None or tokenizer is None or info is None:
            raise not_ready("the model is still loading; GET /startup tells how far", _LOADING_RETRY_SECONDS)
        self.watchdog.check()
        return engine, tokenizer, info

    def generating(self) -> tuple[Engine, Tokenizer, EngineInfo]:
        """Return as `serving` does. Raises ApiError 400 if the model gives no text."""
        engine, tokenizer, info = self.serving()
        if info.pooling is not None:
            name, scores = self.config.served_model_names[0], info.pooling.labels > 0
            raise ApiError(
                400,
                f"{name} gives {'scores' if scores else 'embeddings'} and no text: ask "
                f"{'/v1/rerank or /v1/score' if scores else '/v1/embeddings'}; a server with a model for "
                "text is started with --runner generate",
                param="model",
                code="model_not_supported",
            )
        return engine, tokenizer, info

    def check_model(self, name: str | None) -> str:
        """Return the name to answer with. Raises ApiError 404."""
        names = self.config.served_model_names
        if name is None or name in names:
            return name or names[0]
        served = ", ".join(names)
        raise ApiError(
            404, f"the model {name!r} is not served here, but {served}", param="model", code="model_not_found"
        )

    @property
    def admission(self) -> Admission:
        return Admission(self.metrics, self.queue, self.watchdog, self.past_requests)

    def times_of(self, connection: HTTPConnection, model: str) -> RequestTimes:
        """Begin to note the times of a request, on a WebSocket of one whose message has just come."""
        now, state = time.monotonic(), connection.scope["state"]
        began = state.get("began", now)
        received = state.get("received", began)
        if connection.scope["type"] == "websocket":
            began = received = now
        request_id = state["request_id"].decode()
        path = connection.scope["path"]
        given = connection.headers.get("traceparent")
        trace = TraceContext.of(given) if given is not None or self.exporter is not None else None
        if trace is not None:
            state["traceparent"] = trace.header.encode()  # which the answer has, too
        return RequestTimes(state["tenant"], request_id, began, received, path, model, trace)

    def _export(self, times: RequestTimes) -> None:
        if self.exporter is not None and times.trace is not None and times.trace.sampled:
            self.exporter.add(partial(request_spans, times))

    def admit(self, prompts: int, param: str = "prompt") -> None:
        """Raises ApiError 429 if the queue has no room for so many more, which are in `param`."""
        self.queue.check(prompts, param=param)

    async def encode(
        self, text: str, param: str, *, add_special_tokens: bool, limit: int | None = None
    ) -> list[int]:
        """Encode as `encode_all` does, of one text."""
        (tokens,) = await self.encode_all([text], param, add_special_tokens=add_special_tokens, limit=limit)
        return tokens

    async def encode_all(
        self, texts: list[str], param: str, *, add_special_tokens: bool, limit: int | None = None
    ) -> list[list[int]]:
        """Much text is tokenised in another thread, some at a time, so that streams and others go on.

        Raises ApiError 413, or 400 for what has `limit` tokens or more for certain: it is not tokenised.
        """
        _, tokenizer, _ = self.serving()
        sizes = [utf8_size(text) for text in texts]
        for size in sizes:
            if size > self.config.max_prompt_bytes:
                raise too_large(param, size, self.config.max_prompt_bytes)
            least = tokenizer.least_tokens(size)
            if limit is not None and least >= limit:
                raise no_room(param, f"the prompt has at least {least} tokens", limit)

        def encode(texts: list[str]) -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return await self._encoded(texts, sizes, encode)

    async def encode_pairs(
        self, pairs: list[tuple[str, str]], param: str, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Encode as `encode_all` does, of texts that the model is to compare."""
        _, tokenizer, _ = self.serving()
        sizes = [utf8_size(first) + utf8_size(second) for first, second in pairs]
        if max(sizes) > self.config.max_prompt_bytes:
            raise too_large(param, max(sizes), self.config.max_prompt_bytes)

        def encode(pairs: list[tuple[str, str]]) -> list[list[int]]:
            return [tokenizer.encode_pair(*pair, add_special_tokens=add_special_tokens) for pair in pairs]

        return await self._encoded(pairs, sizes, encode)

    async def _encoded(
        self, items: list[T], sizes: list[int], encode: Callable[[list[T]], list[list[int]]]
    ) -> list[list[int]]:
        if sum(sizes) <= _INLINE:
            return encode(items)
        loop = asyncio.get_running_loop()
        tokens: list[list[int]] = []
        with self.queue.tokenising(sum(sizes)):
            for part in _portions(items, sizes):
                tokens += await loop.run_in_executor(self.pool, encode, part)
        return tokens

    async def decode_all(self, prompts: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Return the texts of prompts; those of many tokens are made in another thread, part by part."""
        _, tokenizer, _ = self.serving()

        def decode(prompts: list[list[int]]) -> list[str]:
            return [tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens) for tokens in prompts]

        sizes = [len(tokens) for tokens in prompts]
        if sum(sizes) <= _INLINE:
            return decode(prompts)
        texts: list[str] = []
        for part in _portions(prompts, sizes):
            texts += await asyncio.get_running_loop().run_in_executor(self.pool, decode, part)
        return texts


def _portions(items: list[T], sizes: list[int]) -> Iterator[list[T]]:
    """Yield some, in order; each has _PORTION together at most, or is a single one that is larger."""
    portion: list[T] = []
    room = _PORTION
    for item, size in zip(items, sizes, strict=True):
        if portion and size > room:
            yield portion
            portion, room = [], _PORTION
        portion.append(item)
        room -= size
    yield portion
