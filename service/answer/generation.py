"""A completions or chat request while the engine works on it: its prompts, its choices, what they cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from quire.engine.errors import EngineDeadError, FieldError
from quire.engine.messages import FinishReason, Output, SamplingParams
from quire.service.admission import Admission
from quire.service.answer.choice import Choice
from quire.service.answer.group import Group, Prompt
from quire.service.answer.options import Options
from quire.service.answer.replies import Usage
from quire.service.engine_client import Engine
from quire.service.errors import ApiError, engine_dead, not_ready, refused
from quire.service.explain.times import RequestTimes, Status
from quire.service.http.access_line import Cost
from quire.service.text.reasoning.use import answer_parser, markers_of
from quire.service.text.turn_end import TurnEnd

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer


class Generation:
    """One request's outputs as they come, from the engine to its choices: `complete` it, and always `close`.

    Raises ApiError from the constructor if a prompt can never fit. Choice `i` is sample `i % n` of prompt
    `i // n`.
    """

    def __init__(
        self,
        admission: Admission,
        engine: Engine,
        tokenizer: Tokenizer,
        prompts: list[Prompt],
        params: list[SamplingParams],
        options: Options,
        cache_salt: str,
        times: RequestTimes,
    ) -> None:
        self._admission = admission
        self._engine = engine
        self.times = times
        self._metrics = admission.metrics
        self.tokenizer = tokenizer
        self.options = options
        self.arrival = time.monotonic()  # when it came
        self._groups: dict[int, Group] = {}
        self._inbox: list[Output] = []
        self._listener: Callable[[], None] | None = None
        self._failed: ApiError | None = None
        self._first_token: float | None = None  # seconds
        self._end_reason: FinishReason = "abort"  # of prompts that are unfinished when it is closed
        self.backlog = 0  # bytes, about, that have come since their reader last set this to 0
        self.unfinished = len(prompts)
        admission.queue.check(len(prompts), sum(len(prompt.tokens) for prompt in prompts))
        try:
            for prompt, sampling in zip(prompts, params, strict=True):
                self._add(engine, prompt, sampling, cache_salt)
        except BaseException:
            self.close()
            raise
        times.queued, times.engine_requests = self.arrival, self.engine_requests
        times.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        admission.past_requests.add(times)
        admission.watchdog.generations.add(self)

    def _add(self, engine: Engine, prompt: Prompt, params: SamplingParams, cache_salt: str) -> None:
        end = self.tokenizer.turn_end if self.options.is_turn and not params.ignore_eos else TurnEnd()
        if end.tokens:
            params = structs.replace(params, stop_token_ids=(*params.stop_token_ids, *end.tokens))
        try:
            stream = engine.add(prompt.tokens, params, cache_salt, self.times.tenant)
        except FieldError as error:
            raise refused(error) from None
        except EngineDeadError as error:
            raise not_ready(f"the engine died: {error}") from None
        options, first = self.options, len(self._groups) * params.n
        context = prompt.tokens if options.continues else []
        markers = markers_of(options.reasoning, options.tools)
        choices = [
            Choice(
                first + i,
                self.tokenizer.detokenizer(
                    context,
                    skip_special_tokens=options.skip_special_tokens,
                    shown=markers,
                ),
                options.stops,
                params.min_tokens,
                answer_parser(options.reasoning, options.tools),
                include_stop=options.include_stop,
                turn_ends=end.strings,
                eos=None if params.ignore_eos else self.tokenizer.eos,
            )
            for i in range(params.n)
        ]
        self._groups[stream.request_id] = Group(prompt, stream, choices, params.n)
        self._admission.queue.enter(len(prompt.tokens))
        stream.listen(self._arrive)

    @property
    def engine_requests(self) -> list[int]:
        """Return the numbers that its prompts' requests have in the engine."""
        return list(self._groups)

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    @property
    def choices(self) -> list[Choice]:
        return [choice for group in self._groups.values() for choice in group.choices]

    @property
    def finished(self) -> bool:
        return self.unfinished == 0

    async def complete(self, tell: Callable[[list[Choice]], None] | None = None) -> None:
        """Take in outputs as they come, until all have, and give `tell` the choices that they were for.

        That is done where they arrive, so it wakes no task. Raises ApiError if the engine fails, or `fail` is
        called, and whatever `tell` raises.
        """
        end = asyncio.get_running_loop().create_future()

        def take_in() -> None:
            if end.done():
                return
            try:
                choices = self._take()
                if tell is not None:
                    tell(choices)
                if self.finished:
                    end.set_result(None)
            except Exception as error:
                end.set_exception(error)

        self._listener = take_in
        if self._inbox or self._failed is not None:
            take_in()
        try:
            await end
        finally:
            self._listener = None

    def _take(self) -> list[Choice]:
        if self._failed is not None:
            raise self._failed
        outputs, self._inbox = self._inbox, []
        return self._take_in(outputs)

    def fail(self, error: ApiError) -> None:
        """Abort what is unfinished, and have `complete` raise `error`."""
        if self.finished or self._failed is not None:
            return
        self._failed = error
        self._end_reason = "error"
        for group in self._groups.values():
            group.stream.abort()
        self._wake()

    def _arrive(self, outputs: list[Output]) -> None:
        self._inbox += outputs
        self._wake()

    def _wake(self) -> None:
        if self._listener is not None:
            self._listener()

    def _take_in(self, outputs: list[Output]) -> list[Choice]:
        now = time.monotonic()
        metrics = self._metrics
        touched: dict[int, Choice] = {}
        for output in outputs:
            group = self._groups[output.request_id]
            choice = group.choices[output.index]
            if choice.finish_reason is not None:
                continue
            if output.error is not None or output.finish_reason in ("error", "abort"):
                raise self._failure(output)
            if not group.started:
                self._start(group, output, now)
            elif output.tokens and choice.num_tokens:
                count = len(output.tokens)
                seconds = (now - choice.last_time) / count
                metrics.inter_token_latency.observe(seconds, count, self.times.request_id)
            choice.last_time = now
            before = choice.num_tokens
            choice.add(self._without_output(output) if self.options.discard_output else output)
            metrics.generation_tokens += choice.num_tokens - before
            touched[choice.index] = choice
            self.backlog += 8 * len(output.tokens)
            if output.logprobs is not None:
                self.backlog += sum(64 + 64 * len(entry.top_tokens) for entry in output.logprobs)
            if choice.finish_reason is not None:
                self._finish(group, choice, now)
        self._note_text(now)
        return list(touched.values())

    def _note_text(self, began: float) -> None:
        """Note that outputs, perhaps the last, have become text since `began`."""
        times, now = self.times, time.monotonic()
        times.text_seconds += now - began
        if self.finished:
            times.finished, times.text_ready = began, now

    @staticmethod
    def _without_output(output: Output) -> Output:
        return Output(output.request_id, output.index, [], finish_reason="length")

    def _failure(self, output: Output) -> ApiError:
        if output.finish_reason == "abort":
            return not_ready("the server is shutting down")
        self._end_reason = "error"
        if self._engine.state == "dead":
            return engine_dead(output.error, 500)
        return ApiError(500, f"the engine failed on this request: {output.error}", code="engine_error")

    def _start(self, group: Group, output: Output, now: float) -> None:
        group.started = True
        group.first_output = now
        group.cached_tokens = output.cached_tokens
        self.times.cached_tokens += output.cached_tokens
        group.prompt_logprobs = output.prompt_logprobs
        group.echo(self.tokenizer, logprobs=self.options.echo_logprobs)
        for choice in group.choices:
            choice.last_time = now
        self._admission.queue.start(len(group.prompt.tokens))
        metrics = self._metrics
        metrics.prompt_tokens += len(group.prompt.tokens)
        metrics.cached_tokens += output.cached_tokens
        metrics.cached_host_tokens += output.cached_host_tokens
        request_id = self.times.request_id
        metrics.time_to_first_token.observe(now - self.arrival, 1, request_id)
        if self._first_token is None:
            self._first_token = now - self.arrival
        if output.queue_seconds is not None:
            metrics.queue_time.observe(output.queue_seconds, 1, request_id)

    def _finish(self, group: Group, choice: Choice, now: float) -> None:
        group.unfinished -= 1
        if group.unfinished:
            group.stream.end_sample(group.choices.index(choice))  # if the engine has not, as below
            return
        reason = choice.finish_reason or "stop"
        self._metrics.finished["stop" if reason == "tool_calls" else reason] += 1
        group.stream.abort()  # does nothing, unless a stop string ended it before the engine did
        self.unfinished -= 1
        self._metrics.request_latency.observe(now - self.arrival, 1, self.times.request_id)

    def close(self) -> None:
        """Abort what is unfinished. Idempotent."""
        self._admission.watchdog.generations.discard(self)
        times = self.times
        if times.ended is None:
            times.output_tokens = sum(choice.num_tokens for choice in self.choices)
            times.finish_reasons = [choice.finish_reason or self._end_reason for choice in self.choices]
            ended: Status = "failed" if self._end_reason == "error" else "aborted"
            self._admission.past_requests.end(times, "finished" if self.unfinished == 0 else ended)
        for group in self._groups.values():
            if group.unfinished:
                group.stream.abort()
                self._metrics.finished[self._end_reason] += 1
                group.unfinished = 0
            if not group.started:
                group.started = True
                self._admission.queue.leave(len(group.prompt.tokens))

    def returned(self) -> list[tuple[Group, Choice]]:
        """Return the choices that the client gets, by index, when all have finished."""
        best = self.options.best
        return [
            (group, choice)
            for group in self._groups.values()
            for choice in (
                group.choices
                if best is None
                else sorted(group.choices, key=lambda choice: -choice.mean_logprob)[:best]
            )
        ]

    def usage(self) -> Usage:
        prompt = sum(len(group.prompt.tokens) for group in self._groups.values())
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(group.cached_tokens for group in self._groups.values())
        return Usage.of(prompt, completion, cached, sum(choice.num_reasoning for choice in self.choices))

    def cost(self) -> Cost:
        """Return what the log tells of it."""
        usage = self.usage()
        cached = sum(group.cached_tokens for group in self._groups.values())
        return Cost(usage.prompt_tokens, cached, usage.completion_tokens, self._first_token)

    def token_text(self, token: int) -> str:
        """Return a token as logprobs have it."""
        return f"token_id:{token}" if self.options.tokens_as_ids else self.tokenizer.token_text(token)
