"""A model for asyncio programs: answers and streams, from an engine in a process of its own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
from msgspec import structs

from quire.arguments import (
    ChatPrompt,
    Message,
    Params,
    Prompt,
    chat_prompt,
    ended_by_turn,
    engine_settings,
    for_engine,
    params_list,
    prompt_list,
    stop_strings,
    turn_stops,
)
from quire.completion import Followed, PromptLogprobs
from quire.engine.client import AsyncEngine
from quire.engine.config import EngineConfig, EngineInfo, KVCacheDtype, ModelImpl, PreemptionMode
from quire.engine.errors import EngineDeadError
from quire.engine.messages import POOLED, Output
from quire.engine.models.hub import resolve_model
from quire.engine.models.pooling import Runner
from quire.engine.request_stream import RequestStream
from quire.offline_requests import RequestFailed
from quire.pooling import ClassificationRequestOutput, EmbeddingRequestOutput, ScoringRequestOutput
from quire.pooling_tasks import PoolingTask, R, classification_task, embedding_task, scoring_task
from quire.request_output import RequestMetrics, RequestOutput
from quire.service.answer.choice import Choice
from quire.service.demo import MODEL_FOLDER
from quire.service.text.named_templates import read_template
from quire.service.text.tokenizer import Tokenizer


class AsyncLLM:
    """`async with AsyncLLM(model) as llm: print(await llm.generate(prompt))`; settings are as LLM's.

    Entering starts the engine's process and waits until it is ready, leaving ends it; `start` and `close` do
    so where there is no `async with`, as in the lifespan of a web application. Requests run side by side in
    one continuous batch; one that is cancelled, or whose stream is closed, is aborted. Several may be there,
    each with its share of the memory. Raises TypeError for a setting that there is not, and ValueError as
    EngineConfig, the tokenizer and the engine's limits do.
    """

    def __init__(
        self,
        model: str = MODEL_FOLDER,
        *,
        device: Literal["auto", "cuda", "cpu"] = "auto",
        dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        runner: Runner = "auto",
        model_impl: ModelImpl = "auto",
        generation_config: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 4.0,
        preemption_mode: PreemptionMode = "auto",
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        seed: int | None = None,
        cache_seed: str | None = None,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        disable_custom_all_reduce: bool = False,
        chat_template: str | None = None,
        **unknown: Any,
    ) -> None:
        settings = engine_settings(locals(), unknown)
        self._engine = AsyncEngine(msgspec.convert({"model": model, **settings}, EngineConfig))
        self._model = model
        template = None if chat_template is None else read_template(chat_template)
        self.tokenizer = Tokenizer.from_folder(resolve_model(model), template)

    def __repr__(self) -> str:
        return f"AsyncLLM({self._model!r}: {self._engine.state})"

    @property
    def info(self) -> EngineInfo:
        """What the engine has, once it is ready."""
        if self._engine.info is None:
            raise RuntimeError("this AsyncLLM has not been started: use `async with`, or await its start()")
        return self._engine.info

    async def start(self) -> None:
        """Start the engine's process, and wait until it is ready. Raises EngineDeadError."""
        await self._engine.start()
        async for _ in self._engine.watch_progress():
            pass
        if self._engine.state != "ready":
            await self._engine.stop()
            raise EngineDeadError(self._engine.error)

    async def close(self) -> None:
        """End the engine's process, and whatever it works on."""
        await self._engine.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, *, stop: str | Sequence[str] = ()
    ) -> RequestOutput:
        """Return the prompt's n completions. Raises RequestFailed if the engine cannot compute them."""
        (given,) = prompt_list(prompt)
        (params,) = params_list(sampling_params, 1, self.info.sampling_defaults.params)
        request = _Request(self, given, params, stop)
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
        prompt = self.chat_prompt(messages)
        return await self.generate(prompt, sampling_params or self._room_after(prompt), stop=stop)

    async def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, *, stop: str | Sequence[str] = ()
    ) -> AsyncIterator[str]:
        """Yield the text of the first completion as it comes. Raises as `generate`.

        What `chat_prompt` returns may be the prompt.
        """
        (given,) = prompt_list(prompt)
        (params,) = params_list(sampling_params, 1, self.info.sampling_defaults.params)
        request = _Request(self, given, params, stop)
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

    def chat_prompt(self, messages: Sequence[Message]) -> ChatPrompt:
        """Return token ids of a conversation, by the model's chat template, that ask for the next answer."""
        return chat_prompt(self.tokenizer, messages)

    async def _pool(self, task: PoolingTask[R]) -> list[R]:
        """Raises RequestFailed if the engine cannot compute one; none is left in the engine then."""
        streams: list[RequestStream] = []
        try:
            for prompt in task.prompts:  # one of which may be refused when others have been queued
                streams += [self._engine.add(prompt, POOLED, pooling=task.params)]
            outputs = [output for stream in streams for output in await stream.get()]
        finally:
            for stream in streams:
                stream.abort()
        for output in outputs:
            if output.vector is None:
                raise RequestFailed(output.error or "it was aborted")
        return task.results(outputs)

    def _room_after(self, prompt: list[int]) -> Params:
        room = max(self.info.max_request_tokens - len(prompt), 1)
        return structs.replace(self.info.sampling_defaults.params(), max_tokens=room)


class _Request:
    """A prompt while the engine works on it."""

    def __init__(
        self, llm: AsyncLLM, prompt: str | list[int], params: Params, stop: str | Sequence[str]
    ) -> None:
        tokenizer = llm.tokenizer
        (stops,) = stop_strings(stop, [params])
        stops = (*stops, *turn_stops(tokenizer, prompt, params))
        self._prompt = (
            tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        )
        context = [] if isinstance(prompt, ChatPrompt) else self._prompt
        self._params = params
        self._followed = [
            Followed(
                Choice(
                    index,
                    tokenizer.detokenizer(context, skip_special_tokens=True),
                    stops,
                    params.min_tokens,
                ),
                lambda: None,
            )
            for index in range(params.n)
        ]
        self._began = time.perf_counter()
        self._first: float | None = None  # when its first token came
        self._cached_tokens = 0
        self._prompt_logprobs: PromptLogprobs | None = None
        self._stream: RequestStream = llm._engine.add(
            self._prompt, ended_by_turn(tokenizer, prompt, for_engine([params])[0])
        )

    def abort(self) -> None:
        """Want no more of it; nothing if it has ended."""
        self._stream.abort()

    async def complete(self) -> RequestOutput:
        try:
            while any(each.choice.finish_reason is None for each in self._followed):
                await self._take()
        finally:
            self.abort()
        now = time.perf_counter()
        completions = [
            each.completion(
                with_logprobs=self._params.logprobs is not None, prompt_logprobs=self._prompt_logprobs
            )
            for each in self._followed
        ]
        metrics = RequestMetrics(
            time_to_first_token=(self._first or now) - self._began,
            seconds=now - self._began,
            cached_tokens=self._cached_tokens,
            output_tokens=sum(len(one.token_ids) for one in completions),
        )
        return RequestOutput(completions, str(self._stream.request_id), self._prompt, metrics)

    async def first_text(self) -> AsyncIterator[str]:
        first = self._followed[0].choice
        while first.finish_reason is None:
            await self._take()
            if text := first.take_text():
                yield text

    async def _take(self) -> None:
        for output in await self._stream.get():
            self._add(output)

    def _add(self, output: Output) -> None:
        if output.error is not None:
            raise RequestFailed(output.error)
        if self._first is None:
            self._first = time.perf_counter()
            self._cached_tokens = output.cached_tokens
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        self._followed[output.index].add(output)
