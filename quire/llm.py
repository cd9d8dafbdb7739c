"""Offline use: prompts in, completions out, on the engine that serves, in this process."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

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
    usual_params,
)
from quire.configured import Configured
from quire.engine.config import EngineInfo, Progress
from quire.engine.core import EngineCore
from quire.engine.messages import POOLED, Request
from quire.engine.startup import start_with_graphs
from quire.offline_engine import OfflineEngine, TextStream, without_collections
from quire.pooling import ClassificationRequestOutput, EmbeddingRequestOutput, ScoringRequestOutput
from quire.pooling_tasks import PoolingTask, R, classification_task, embedding_task, scoring_task
from quire.prompt_bar import prompt_bar
from quire.request_output import RequestOutput
from quire.service.commands.progress import PhaseBars


class LLM(Configured):
    """A model in this process: `LLM(model).generate(prompts, SamplingParams(max_tokens=64))`.

    A model is a folder or a Hub id; left out, it is the bundled demo model. The others are the flags of
    `quire serve`, with their defaults. All CUDA graphs are captured before it is there. A terminal shows how
    it starts, unless `on_progress` is given. `chat_template` is the name of one, or a file, to use instead of
    the model's (`quire serve --help` has names).

    Raises TypeError for a setting that there is not, and ValueError as EngineConfig, the loader and the
    tokenizer do.

    One thread at a time may use it. Ctrl-C ends what it interrupts; the LLM can be used again. Leaving a
    `with`, or `close`, gives its memory back. Several may be there, each with its share of the memory.
    """

    def _begin(self, on_progress: Callable[[Progress], None] | None) -> None:
        if on_progress is None:
            on_progress = PhaseBars().show if sys.stderr.isatty() else lambda _: None
        self.tokenizer = self._read_tokenizer()  # first: what is wrong with it costs no start
        core, self.info = start_with_graphs(self._config, on_progress)
        self._engine: OfflineEngine | None = OfflineEngine(core, self.tokenizer)
        self._ids = itertools.count()

    @property
    def engine(self) -> OfflineEngine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed: make a new one")
        return self._engine

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    def __repr__(self) -> str:
        info: EngineInfo = self.info
        state = ", closed" if self._engine is None else ""
        return (
            f"LLM({info.model!r}: {info.architecture} in {info.dtype} on {info.device}, {info.num_blocks:,} "
            f"KV blocks of {info.block_size} tokens{state})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back its memory, which ends what is under way. It cannot be used afterwards."""
        if self._engine is None:
            return
        self._engine = None
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        stop: str | Sequence[str] = (),
    ) -> list[RequestOutput]:
        """Return each prompt's n completions, all prompts in one continuous batch.

        `sampling_params` are for all prompts, or one for each; without, 16 tokens or as many as fit, chosen
        as generation_config.json of the model or of `generation_config` has it. Those without a seed draw one
        for each prompt. `stop` are strings that end any of the texts, beside their params' own. On a terminal
        a bar counts prompts unless `use_tqdm` is false; it may be tqdm's kin.

        Raises ValueError for a prompt that can never fit, and for too many or too few params.
        """
        return self._answer(prompt_list(prompts), sampling_params, stop, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        stop: str | Sequence[str] = (),
    ) -> list[RequestOutput]:
        """Return the next answers of a conversation, or of several, as `generate` does.

        Without `sampling_params` an answer has as many tokens as fit, as over HTTP. Raises ValueError if the
        model has no chat template.
        """
        one = isinstance(messages, str) or (messages and isinstance(messages[0], dict))
        several: Any = [messages] if one else messages
        prompts: list[str | list[int]] = [self.chat_prompt(each) for each in several]
        return self._answer(prompts, sampling_params, stop, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, *, stop: str | Sequence[str] = ()
    ) -> TextStream:
        """Stream the text of the first completion, as it comes; others may be asked for meanwhile."""
        (given,) = prompt_list(prompt)
        tokens = prompt_tokens(self.tokenizer, given)
        (params,) = self._params([tokens], sampling_params)
        (stops,) = stop_strings(stop, [params])
        return self.engine.stream(self._request(tokens, for_engine([params])[0]), stops)

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return each prompt's vector, of a model that embeds or with `runner="pooling"`.

        `dimensions` and `normalize` are as over HTTP. Raises ValueError for what the model cannot do.
        """
        return self._pool(embedding_task(self.info, self.tokenizer, prompts, dimensions, normalize), use_tqdm)

    def classify(
        self, prompts: Prompt | Iterable[Prompt], use_tqdm: bool | Callable[..., Any] = True
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of each prompt's labels, of a model whose config.json names labels.

        Raises ValueError for a model that tells no labels apart.
        """
        return self._pool(classification_task(self.info, self.tokenizer, prompts), use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[ScoringRequestOutput]:
        """Return how well one text fits each of several, or those of two lists pair by pair.

        By the head of a model that has one for that, or by the cosine of embeddings.
        """
        return self._pool(scoring_task(self.info, self.tokenizer, text_1, text_2), use_tqdm)

    def _answer(
        self,
        prompts: Sequence[str | list[int]],
        sampling_params: Params | Sequence[Params] | None,
        stop: str | Sequence[str],
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        engine = self.engine
        with without_collections():
            tokens = [prompt_tokens(self.tokenizer, prompt) for prompt in prompts]
            params = self._params(tokens, sampling_params)
            stops = stop_strings(stop, params)
            requests = [self._request(*pair) for pair in zip(tokens, for_engine(params), strict=True)]
            with prompt_bar(len(prompts), use_tqdm) as tell:
                outputs = engine.answer(requests, engine.core.add_all, stops, tell)
        for prompt, output in zip(prompts, outputs, strict=True):
            output.prompt = prompt if isinstance(prompt, str) else None
        return outputs

    def _pool(self, task: PoolingTask[R], use_tqdm: bool | Callable[..., Any]) -> list[R]:
        requests = [
            Request(next(self._ids), prompt, POOLED, pooling=params)
            for prompt, params in zip(task.prompts, task.params, strict=True)
        ]
        with prompt_bar(len(requests), use_tqdm) as tell:
            return task.results(self.engine.pool(requests, tell))

    def _params(self, prompts: list[list[int]], given: Params | Sequence[Params] | None) -> list[Params]:
        if given is None:
            return [usual_params(self.info, prompt) for prompt in prompts]
        return params_list(given, len(prompts))

    def _request(self, prompt: list[int], params: Params) -> Request:
        return Request(next(self._ids), prompt, ended_by_turn(self.tokenizer, prompt, params))
