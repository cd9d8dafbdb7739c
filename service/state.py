"""What all endpoints share: the engine and tokenizer once they are there, who is being served, and limits."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.config import EngineInfo
from service.config import ServiceConfig
from service.engine_client import Engine
from service.errors import ApiError, not_ready
from service.grammar_trials import GrammarTrials
from service.interruption import Interruptible
from service.loop_watch import LoopWatch
from service.metrics import Metrics
from service.resumption.recordings import Recordings
from service.waiting import WaitingLine
from service.watchdog import Watchdog

if TYPE_CHECKING:
    from service.tokenizer import Tokenizer

_INLINE_CHARS = 2048  # tokenising this much takes about as long as a trip to another thread and back
_LOADING_RETRY_SECONDS = 5


class ServerState:
    """Lives as long as the process. `engine` and `tokenizer` are None until they are up."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.metrics = Metrics(config.served_model_names[0])
        self.created = int(time.time())
        self.engine: Engine | None = None
        self.tokenizer: Tokenizer | None = None
        self.engine_set = asyncio.Event()
        self.draining = False
        self.generations: set[Interruptible] = set()  # a drain waits for these
        self.streams: set[Interruptible] = set()  # but not for these (/startup)
        self.recordings = Recordings(config, self.generations)
        self.loop_watch = LoopWatch()
        self.pool = ThreadPoolExecutor(2, "tokenizer")
        self.waiting = WaitingLine(config)
        self.watchdog = Watchdog(config.stall_timeout)
        self.grammar_trials = GrammarTrials()

    def set_engine(self, engine: Engine) -> None:
        engine.on_stats = self.metrics.step
        engine.on_registry = self.metrics.registry_report
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
        self.metrics.engine_info = info
        return engine, tokenizer, info

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404."""
        names = self.config.served_model_names
        if name is None or name in names:
            return name or names[0]
        served = ", ".join(names)
        raise ApiError(
            404, f"the model {name!r} is not served here, but {served}", param="model", code="model_not_found"
        )

    def admit(self, prompts: int, tokens: int = 0) -> None:
        """Raises ApiError 429 if the queue has no room for so many more."""
        self.waiting.check(prompts, tokens)

    async def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Long texts are tokenised in another thread, so that streams go on."""
        _, tokenizer, _ = self.serving()
        size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        if size > self.config.max_prompt_bytes:
            raise ApiError(
                413,
                f"{param}: the prompt has {size} bytes, more than {self.config.max_prompt_bytes}",
                param=param,
                code="prompt_too_large",
            )
        if size <= _INLINE_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        with self.waiting.tokenising(size):
            return await loop.run_in_executor(
                self.pool, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )
