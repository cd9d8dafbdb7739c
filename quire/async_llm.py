"""A model for asyncio programs: answers and streams, from an engine in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Self

from quire.answers import Answers, follow
from quire.arguments import (
    Message,
    Params,
    Prompt,
    ended_by_turn,
    for_engine,
    params_list,
    prompt_list,
    prompt_tokens,
    stop_strings,
    turn_stops,
    usual_params,
)
from quire.completion import Followed
from quire.configured import Configured
from quire.engine.client import AsyncEngine
from quire.engine.config import EngineInfo, Progress
from quire.engine.errors import EngineDeadError
from quire.engine.messages import POOLED
from quire.engine.request_stream import RequestStream
from quire.offline_requests import RequestFailed
from quire.pooling import ClassificationRequestOutput, EmbeddingRequestOutput, ScoringRequestOutput
from quire.pooling_tasks import PoolingTask, R, classification_task, embedding_task, scoring_task
from quire.request_output import RequestOutput


class AsyncLLM(Configured):
    """`async with AsyncLLM(model) as llm: print(await llm.generate(prompt))`; settings are as LLM's.

    Entering starts the engine's process and waits until it is ready, leaving ends it; `start` and `close` do
    so where there is no `async with`, as in the lifespan of a web application. Requests run side by side in
    one continuous batch; one that is cancelled, or whose stream is closed, is aborted. Several may be there,
    each with its share of the memory. Raises TypeError for a setting that there is not, and ValueError as
    EngineConfig, the tokenizer and the engine's limits do.
    """

    def _begin(self, on_progress: Callable[[Progress], None] | None) -> None:
        self._engine = AsyncEngine(self._config)
        self._on_progress = on_progress
        self.tokenizer = self._read_tokenizer()

    def __repr__(self) -> str:
        return f"AsyncLLM({self._config.model!r}: {self._engine.state})"

    @property
    def info(self) -> EngineInfo:
        """Return what the engine has, once it is ready."""
        if self._engine.info is None:
            raise RuntimeError("this AsyncLLM has not been started: use `async with`, or await its start()")
        return self._engine.info

    async def start(self) -> None:
        """Start the engine's process, and wait until it is ready. Raises EngineDeadError.

        Whatever it raises, cancelled or not, it leaves no process.
        """
        try:
            await self._engine.start()
            async for progress in self._engine.watch_progress():
                if self._on_progress is not None:
                    self._on_progress(progress)
            if self._engine.state != "ready":
                raise EngineDeadError(self._engine.error)
        except BaseException:
            await self._engine.stop()
            raise

    async def close(self) -> None:
        """End the engine's process, and whatever it works on."""
        await self._engine.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, *, stop: str | Sequence[str] = ()
    ) -> RequestOutput:
        """Return the prompt's n completions. Raises RequestFailed if the engine cannot compute them."""
        (given,) = prompt_list(prompt)
        request = _Request(self, given, sampling_params, stop)
        output = await request.complete()
        output.prompt = given if isinstance(given, str) else None
        return output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> RequestOutput:
        """Return the next answers of a conversation; without `sampling_params` of as many tokens as fit."""
        return await self.generate(self.chat_prompt(messages), sampling_params, stop=stop)

    async def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, *, stop: str | Sequence[str] = ()
    ) -> AsyncIterator[str]:
        """Yield the text of the first completion as it comes. Raises as `generate`.

        What `chat_prompt` returns may be the prompt.
        """
        (given,) = prompt_list(prompt)
        request = _Request(self, given, sampling_params, stop)
        try:
            async for text in request.first_text():
                yield text
        finally:
            request.abort()

    async def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return each prompt's vector, as LLM's `embed` does."""
        return await self._pool(embedding_task(self.info, self.tokenizer, prompts, dimensions, normalize))

    async def classify(self, prompts: Prompt | Iterable[Prompt]) -> list[ClassificationRequestOutput]:
        """Return the probabilities of each prompt's labels, as LLM's `classify` does."""
        return await self._pool(classification_task(self.info, self.tokenizer, prompts))

    async def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str]
    ) -> list[ScoringRequestOutput]:
        """Return how well texts fit, as LLM's `score` does."""
        return await self._pool(scoring_task(self.info, self.tokenizer, text_1, text_2))

    async def _pool(self, task: PoolingTask[R]) -> list[R]:
        """Raises RequestFailed if the engine cannot compute one; none is left in the engine then."""
        streams: list[RequestStream] = []
        try:
            for prompt, params in zip(task.prompts, task.params, strict=True):
                # One may be refused when others have been queued.
                streams += [self._engine.add(prompt, POOLED, pooling=params)]
            outputs = [output for stream in streams for output in await stream.get()]
        finally:
            for stream in streams:
                stream.abort()
        for output in outputs:
            if output.vector is None:
                raise RequestFailed(output.error or "it was aborted")
        return task.results(outputs)


class _Request(Answers[Followed]):
    """A prompt while the engine works on it."""

    def __init__(
        self, llm: AsyncLLM, prompt: str | list[int], given: Params | None, stop: str | Sequence[str]
    ) -> None:
        tokenizer = llm.tokenizer
        self._prompt = prompt_tokens(tokenizer, prompt)
        (params,) = params_list(usual_params(llm.info, self._prompt) if given is None else given, 1)
        self._params = params
        (stops,) = stop_strings(stop, [params])
        stops = (*stops, *turn_stops(tokenizer, prompt, params))
        self._stream: RequestStream = llm._engine.add(
            self._prompt, ended_by_turn(tokenizer, prompt, for_engine([params])[0])
        )
        super().__init__(follow(tokenizer, self._prompt, params, stops, self._stream.end_sample))

    def abort(self) -> None:
        """Want no more of it; nothing if it has ended."""
        self._stream.abort()

    async def complete(self) -> RequestOutput:
        try:
            while any(each.choice.finish_reason is None for each in self.choices):
                await self._take()
        finally:
            self.abort()
        self.end()
        return self.described(self._stream.request_id, self._prompt, self._params)

    async def first_text(self) -> AsyncIterator[str]:
        first = self.choices[0].choice
        while first.finish_reason is None:
            await self._take()
            if text := first.take_text():
                yield text

    async def _take(self) -> None:
        for output in await self._stream.get():
            if output.error is not None:
                raise RequestFailed(output.error)
            self.add(output)
