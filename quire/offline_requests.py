"""What callers of an engine in this process have asked for, and what has come of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.completion import Followed, Gathered, PromptLogprobs
from quire.engine.messages import Output, Request
from quire.request_output import RequestMetrics, RequestOutput


class RequestFailed(RuntimeError):
    """The engine could not compute a request, for its `error`."""

    def __init__(self, error: str) -> None:
        super().__init__(f"the engine failed on a prompt: {error}")
        self.error = error


class Job:
    """One caller's requests."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.unfinished = len(requests)
        self.error: str | None = None  # that a request of it ended with

    def check(self) -> None:
        """Raise RequestFailed if one of them has."""
        if self.error is not None:
            raise RequestFailed(self.error)


class Asked:
    """A request, and what has come of it."""

    __slots__ = (
        "_began",
        "_cached_tokens",
        "_ended",
        "_first",
        "choices",
        "job",
        "prompt_logprobs",
        "request",
        "unfinished",
    )

    def __init__(self, job: Job, request: Request, choices: list[Gathered] | list[Followed]) -> None:
        self.job = job
        self.request = request
        self.choices = choices
        self.unfinished = len(choices)
        self.prompt_logprobs: PromptLogprobs | None = None
        self._began = time.perf_counter()
        self._first: float | None = None  # when its first token came
        self._ended = self._began
        self._cached_tokens = 0

    def add(self, output: Output) -> None:
        if self._first is None:
            self._first = time.perf_counter()
            self._cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.error is not None:
            self.job.error = output.error
        self.choices[output.index].add(output)

    def end(self) -> None:
        """Note when its last choice has ended."""
        self._ended = time.perf_counter()

    def output(self) -> RequestOutput:
        with_logprobs = self.request.params.logprobs is not None
        completions = [
            choice.completion(with_logprobs=with_logprobs, prompt_logprobs=self.prompt_logprobs)
            for choice in self.choices
        ]
        metrics = RequestMetrics(
            time_to_first_token=(self._first or self._ended) - self._began,
            seconds=self._ended - self._began,
            cached_tokens=self._cached_tokens,
            output_tokens=sum(len(one.token_ids) for one in completions),
        )
        return RequestOutput(completions, str(self.request.id), self.request.prompt, metrics)


class PooledRequest:
    """A request for a vector, and its only output."""

    def __init__(self, job: Job, request: Request, end: Callable[[int], object]) -> None:
        self.job = job
        self.request = request
        self.choices: list[Gathered] = []  # nothing is generated
        self.unfinished = 1
        self.result: Output | None = None
        self._end = end

    def add(self, output: Output) -> None:
        self.result = output
        if output.error is not None:
            self.job.error = output.error
        self._end(self.request.id)

    def end(self) -> None:
        """Note nothing."""
