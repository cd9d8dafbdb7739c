"""What comes of a request: its choices one by one, and what all of them cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from quire.arguments import ChatPrompt, Params
from quire.completion import Followed, Gathered, PromptLogprobs
from quire.engine.messages import Output
from quire.request_output import RequestMetrics, RequestOutput
from quire.service.answer.choice import Choice
from quire.service.text.detokenizer import Detokenizer
from quire.service.text.tokenizer import Tokenizer

C = TypeVar("C", bound=Gathered | Followed)


class Answers(Generic[C]):
    """A request's choices as its outputs come."""

    __slots__ = ("_began", "_cached_tokens", "_ended", "_first", "_prompt_logprobs", "choices")

    def __init__(self, choices: Sequence[C]) -> None:
        self.choices = choices
        self._prompt_logprobs: PromptLogprobs | None = None
        self._began = self._ended = time.perf_counter()
        self._first: float | None = None  # when its first token came
        self._cached_tokens = 0

    def add(self, output: Output) -> None:
        if self._first is None:
            self._first = time.perf_counter()
            self._cached_tokens = output.cached_tokens
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        self.choices[output.index].add(output)

    def end(self) -> None:
        """Note when its last choice has ended."""
        self._ended = time.perf_counter()

    def described(self, request_id: int, prompt: list[int], params: Params) -> RequestOutput:
        """Return all of it."""
        completions = [
            choice.completion(
                with_logprobs=params.logprobs is not None, prompt_logprobs=self._prompt_logprobs
            )
            for choice in self.choices
        ]
        metrics = RequestMetrics(
            time_to_first_token=(self._first or self._ended) - self._began,
            seconds=self._ended - self._began,
            cached_tokens=self._cached_tokens,
            output_tokens=sum(len(one.token_ids) for one in completions),
        )
        return RequestOutput(completions, str(request_id), prompt, metrics)


def detokenizers(tokenizer: Tokenizer, prompt: list[int], count: int) -> Iterator[Detokenizer]:
    """Yield so many, for the choices of a prompt."""
    context = [] if isinstance(prompt, ChatPrompt) else prompt
    for _ in range(count):
        yield tokenizer.detokenizer(context, skip_special_tokens=True)


def follow(
    tokenizer: Tokenizer,
    prompt: list[int],
    params: Params,
    stops: tuple[str, ...],
    end: Callable[[int], object],
) -> list[Followed]:
    """Return a prompt's choices, which strings may end; `end` is given the index of each that has."""
    return [
        Followed(Choice(index, each, stops, params.min_tokens), end)
        for index, each in enumerate(detokenizers(tokenizer, prompt, params.n))
    ]
