"""What callers of an engine in this process have asked for, and what has come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.answers import Answers
from quire.completion import Followed, Gathered
from quire.engine.messages import Output, Request
from quire.request_output import RequestOutput


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


class Asked(Answers[Gathered | Followed]):
    """A request, and what has come of it."""

    __slots__ = ("job", "request", "unfinished")

    def __init__(self, job: Job, request: Request, choices: list[Gathered] | list[Followed]) -> None:
        super().__init__(choices)
        self.job = job
        self.request = request
        self.unfinished = len(choices)

    def add(self, output: Output) -> None:
        if output.error is not None:
            self.job.error = output.error
        super().add(output)

    def output(self) -> RequestOutput:
        return self.described(self.request.id, self.request.prompt, self.request.params)


@dataclass(slots=True, eq=False)
class PooledRequest:
    """A request for a vector, and its only output."""

    job: Job
    request: Request
    _end: Callable[[tuple[int, int]], object]
    choices: list[Gathered] = field(default_factory=list)  # nothing is generated
    unfinished: int = 1
    result: Output | None = None

    def add(self, output: Output) -> None:
        self.result = output
        if output.error is not None:
            self.job.error = output.error
        self._end((self.request.id, 0))

    def end(self) -> None:
        """Note nothing."""
