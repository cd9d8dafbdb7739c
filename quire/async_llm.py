"""A model for asyncio programs: answers and streams, from an engine in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import msgspec

from quire.arguments import ChatPrompt, Prompt, check_names, stop_strings
from quire.completion import Completion, Followed
from quire.engine.client import AsyncEngine, RequestStream
from quire.engine.config import EngineConfig
from quire.engine.errors import EngineDeadError
from quire.engine.messages import Output, SamplingParams
from quire.engine.models.hub import resolve_model
from quire.offline_engine import RequestFailed
from quire.service.answer.choice import Choice
from quire.service.demo import MODEL_FOLDER
from quire.service.text.tokenizer import Tokenizer


class AsyncLLM:
    """`async with AsyncLLM(model) as llm: print(await llm.generate(prompt))`; `settings` are EngineConfig's.

    Entering starts the engine's process and waits until it is ready, leaving ends it. Requests run side by
    side in one continuous batch; one that is cancelled, or whose stream is closed, is aborted. Raises
    TypeError for a setting that there is not, and ValueError as EngineConfig, the tokenizer and the engine's
    limits do.
    """

    def __init__(self, model: str = MODEL_FOLDER, **settings: object) -> None:
        check_names(settings)
        config = msgspec.convert({"model": model, **settings}, EngineConfig)
        self._engine = AsyncEngine(config)
        self.tokenizer = Tokenizer.from_folder(resolve_model(model))

    async def __aenter__(self) -> Self:
        await self._engine.start()
        async for _ in self._engine.watch_progress():
            pass
        if self._engine.state != "ready":
            await self._engine.stop()
            raise EngineDeadError(self._engine.error)
        assert self._engine.info is not None
        self._defaults = self._engine.info.sampling_defaults
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._engine.stop()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, stop: str | Sequence[str] = ()
    ) -> list[Completion]:
        """Return the prompt's n completions. Raises RequestFailed if the engine cannot compute them."""
        params = self._defaults.params() if params is None else params
        stream, followed = self._ask(prompt, params, stop_strings(stop, [params]))
        prompt_logprobs = None
        try:
            while any(each.choice.finish_reason is None for each in followed):
                for output in await stream.get():
                    _add(output, followed)
                    prompt_logprobs = output.prompt_logprobs or prompt_logprobs
        finally:
            stream.abort()
        with_logprobs = params.logprobs is not None
        return [
            each.completion(with_logprobs=with_logprobs, prompt_logprobs=prompt_logprobs) for each in followed
        ]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, stop: str | Sequence[str] = ()
    ) -> AsyncIterator[str]:
        """Yield the text of the first completion as it comes. Raises as `generate`."""
        params = self._defaults.params() if params is None else params
        stream, followed = self._ask(prompt, params, stop_strings(stop, [params]))
        first = followed[0].choice
        try:
            while first.finish_reason is None:
                for output in await stream.get():
                    _add(output, followed)
                if text := first.take_text():
                    yield text
        finally:
            stream.abort()

    def _ask(
        self, prompt: Prompt, params: SamplingParams, stops: tuple[str, ...]
    ) -> tuple[RequestStream, list[Followed]]:
        tokens = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        context = [] if isinstance(prompt, ChatPrompt) else tokens
        followed = [
            Followed(
                Choice(
                    index,
                    self.tokenizer.detokenizer(context, skip_special_tokens=True),
                    stops,
                    params.min_tokens,
                ),
                lambda: None,
            )
            for index in range(params.n)
        ]
        return self._engine.add(tokens, params), followed


def _add(output: Output, followed: list[Followed]) -> None:
    if output.error is not None:
        raise RequestFailed(output.error)
    followed[output.index].add(output)
