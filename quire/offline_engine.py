"""An engine that this process steps, for several callers in turn: whose each token is, and what ends."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import getitem

from quire.answers import detokenizers, follow
from quire.arguments import turn_stops
from quire.completion import Followed, Gathered
from quire.engine.core import EngineCore
from quire.engine.messages import Output, Request, StepOutputs
from quire.interrupts import PostponedInterrupt
from quire.offline_requests import Asked, Job, PooledRequest
from quire.prompt_bar import Tell
from quire.request_output import RequestOutput
from quire.service.text.tokenizer import Tokenizer

Queue = Callable[[list[Request]], None]


class OfflineEngine:
    """Each caller steps it until what he asked for is done; what others asked for goes on meanwhile.

    One thread at a time. Nothing within a step may be interrupted (`PostponedInterrupt`).
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.core = core
        self.tokenizer = tokenizer
        tokenizer.look_up(core.scheduler.state.capacity.vocab_size)
        self._asked: dict[int, Asked | PooledRequest] = {}
        self._tokens: dict[int, list[list[int]]] = {}  # of the choices of each: where its next one is added
        self._followed: dict[int, list[Followed]] = {}  # choices of those whose tokens are looked at
        self._ended: list[tuple[int, int]] = []  # request and index of each choice that has in this step
        self._leaving: list[Job] = []  # whose callers have gone, and whose requests are to be forgotten
        self._busy = False
        self._failed: BaseException | None = None  # what left a step unfinished

    def answer(
        self,
        requests: list[Request],
        queue: Queue,
        stops: list[tuple[str, ...]] | None = None,
        tell: Tell | None = None,
    ) -> list[RequestOutput]:
        """Return the completions of each, once all have ended; `queue` gives them to the core.

        `stops` are the strings that end the texts of each; `tell` is told how many more have ended.
        Raise what `queue` does, and RequestFailed if one of them fails; none is left in the engine then.
        """
        job = Job(requests)
        with without_collections(), PostponedInterrupt() as interrupt:
            own = stops or [()] * len(requests)
            asked = [
                Asked(job, request, self._follow(request, ends) if ends else self._gather(request))
                for request, given in zip(requests, own, strict=True)
                for ends in [self._stops(request, given)]
            ]
            self._complete(job, asked, queue, interrupt, tell)
        return [one.output() for one in asked]

    def pool(self, requests: list[Request], tell: Tell | None = None) -> list[Output]:
        """Return the output of each, which has its vector. Raise as `answer` does."""
        job = Job(requests)
        asked = [PooledRequest(job, request, self._ended.append) for request in requests]
        with without_collections(), PostponedInterrupt() as interrupt:
            self._complete(job, asked, self.core.add_all, interrupt, tell)
        return [one.result for one in asked if one.result is not None]

    def _complete(
        self,
        job: Job,
        asked: Sequence[Asked | PooledRequest],
        queue: Queue,
        interrupt: PostponedInterrupt,
        tell: Tell | None,
    ) -> None:
        """Step until all of a job's requests have ended."""
        try:
            self._begin(job, asked, queue)
            while left := job.unfinished:
                self.step()
                job.check()
                interrupt.check()
                if tell is not None and job.unfinished < left:
                    tell(left - job.unfinished)
        finally:
            self.leave(job)

    def stream(self, request: Request, stops: tuple[str, ...] = ()) -> TextStream:
        """Stream the text of its first choice, as it comes."""
        job = Job([request])
        choices = self._follow(request, self._stops(request, stops))
        stream = TextStream(self, job, choices[0])
        try:
            with PostponedInterrupt():
                self._begin(job, [Asked(job, request, choices)], self.core.add_all)
        except BaseException:  # what postponed an interrupt ends in one, and may hold on to the stream
            self.leave(job)
            raise
        return stream

    def _stops(self, request: Request, asked: tuple[str, ...]) -> tuple[str, ...]:
        """Return the strings that end it: those that were asked for, and of a chat the end of its turn."""
        return (*asked, *turn_stops(self.tokenizer, request.prompt, request.params))

    def _gather(self, request: Request) -> list[Gathered]:
        end = _noting(self._ended, request.id)
        each = enumerate(detokenizers(self.tokenizer, request.prompt, request.params.n))
        return [Gathered(index, detokenizer, end) for index, detokenizer in each]

    def _follow(self, request: Request, stops: tuple[str, ...]) -> list[Followed]:
        end = _noting(self._ended, request.id)
        return follow(self.tokenizer, request.prompt, request.params, stops, end)

    def _begin(self, job: Job, asked: Sequence[Asked | PooledRequest], queue: Queue) -> None:
        self._enter()
        try:
            for one in asked:
                self._asked[one.request.id] = one
                self._tokens[one.request.id] = [choice.tokens for choice in one.choices]
                if followed := [choice for choice in one.choices if isinstance(choice, Followed)]:
                    self._followed[one.request.id] = followed
            queue(job.requests)
        except BaseException:
            self._leaving.append(job)
            raise
        finally:
            self._exit()

    def step(self) -> None:
        """Step the engine once, and give everyone what is theirs."""
        self._enter()
        try:
            outputs = self._step_core()
            # Nothing here but `append` is done for each token, and that by no bytecode.
            choices = map(getitem, map(self._tokens.__getitem__, outputs.request_ids), outputs.indices)
            deque(map(list.append, choices, outputs.tokens), maxlen=0)
            if self._followed:
                for request_id, index in zip(outputs.request_ids, outputs.indices, strict=True):
                    if request_id in self._followed:
                        self._followed[request_id][index].follow()
            for output in outputs.others:
                if output.request_id in self._asked:  # else it left while a step was interrupted
                    self._asked[output.request_id].add(output)
            for request_id, index in self._ended:
                self._end_choice(self._asked[request_id], index)
        finally:
            self._ended.clear()
            self._exit()

    def leave(self, job: Job) -> None:
        """Forget what of it has not ended. When nobody is left the engine comes to rest."""
        self._leaving.append(job)
        if self._busy:  # a stream was found to be garbage in the middle of a step, whose end sees to it
            return
        self._busy = True
        try:
            self._forget_leaving()
            while not self._asked and self._failed is None and self.core.has_work:
                self._step_core()
        finally:
            self._exit()

    # -- pieces ---------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._busy:
            raise RuntimeError("one thread at a time may use an LLM, and another one does")
        if self._failed is not None:
            raise RuntimeError(
                f"the engine cannot go on, make a new LLM: a step ended with {self._failed!r}"
            ) from self._failed
        self._busy = True

    def _exit(self) -> None:
        self._forget_leaving()
        self._busy = False

    def _step_core(self) -> StepOutputs:
        try:
            return self.core.step()
        except BaseException as error:
            self._failed = error if self.core.torn else None
            raise

    def _end_choice(self, asked: Asked | PooledRequest, index: int) -> None:
        asked.unfinished -= 1
        if asked.unfinished:
            self.core.end_sample(asked.request.id, index)  # which does not know of stop strings
        else:
            asked.end()
            asked.job.unfinished -= 1
            self._forget(asked.request.id)

    def _forget_leaving(self) -> None:
        while self._leaving:
            for request in self._leaving.pop().requests:
                if request.id in self._asked:
                    self._forget(request.id)

    def _forget(self, request_id: int) -> None:
        """Drop a request. The core may have to be told: it does not know of stop strings."""
        del self._asked[request_id], self._tokens[request_id]
        self._followed.pop(request_id, None)
        if self._failed is None:
            self.core.abort(request_id)


def _noting(ended: list[tuple[int, int]], request_id: int) -> Callable[[int], None]:
    """Return what notes the end of a request's choice by its index; it does not hold the engine."""
    return lambda index: ended.append((request_id, index))


@contextmanager
def without_collections() -> Iterator[None]:
    """Leave garbage alone: looking through all objects takes as long as many steps, and finds none here."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class TextStream(Iterator[str]):
    """A request's text. Once it is closed, dropped or interrupted, the request is forgotten."""

    _open = False  # until it is made as a whole

    def __init__(self, engine: OfflineEngine, job: Job, followed: Followed) -> None:
        self._engine = engine
        self._job = job
        self._choice = followed.choice
        self._open = True

    def __next__(self) -> str:
        try:
            while True:
                if text := self._choice.take_text():
                    return text
                if self._choice.finish_reason is not None or not self._open:
                    break
                with PostponedInterrupt() as interrupt:
                    self._engine.step()
                    self._job.check()
                    interrupt.check()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Want no more of it."""
        with PostponedInterrupt():
            if self._open:
                self._open = False
                self._engine.leave(self._job)

    def __del__(self) -> None:
        if self._open:
            self.close()
