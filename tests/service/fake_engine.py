"""An engine without a model: the service's tests decide which tokens come, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from quire.engine.arrays import Vectors
from quire.engine.config import EngineInfo, Progress, RegistryReport, StepStats
from quire.engine.errors import EngineDeadError
from quire.engine.inspection.messages import (
    FREE,
    Answer,
    BlockAnswer,
    BlockQuestion,
    OwnAnswer,
    OwnQuestion,
    PoolAnswer,
    PoolQuestion,
    PrefixAnswer,
    Question,
)
from quire.engine.messages import (
    FinishReason,
    Output,
    PoolingParams,
    Request,
    SamplingParams,
    TokenLogprob,
)
from quire.engine.models.generation_config import SamplingDefaults
from quire.engine.models.pooling import Pooling
from quire.engine.records import Company, RequestRecord
from quire.engine.schedule.pooled import finished
from quire.engine.sequences.timeline import Timeline
from quire.service.text.tokenizer import Tokenizer

Script = Callable[[list[int], SamplingParams, int], list[int]]


HIDDEN = 8


def make_info(tokenizer: Tokenizer, pooling: Pooling | None = None) -> EngineInfo:
    """What the service reads of it is real; the rest is 1."""
    read: dict[str, Any] = {
        "model": "/models/tiny",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "device": "cpu",
        "vocab_size": 320,
        "eos_token_ids": (tokenizer.encode("<|end|>", add_special_tokens=False)[0],),
        "max_model_len": 400,
        "block_size": 16,
        "num_blocks": 100,
        "num_host_blocks": 64,
        "bytes_per_block": 1024,
        "max_num_seqs": 130,
        "windows": (0,),
        "group_layers": (1,),
        "group_windows": (),
        "rank_memory_bytes": (1 << 30,),
        "all_reduce_seconds": 0.0,
        "sampling_defaults": SamplingDefaults(),
        "pooling": pooling,
        "merged": None,
        "vector_size": HIDDEN,
    }
    rest: dict[str, Any] = {
        field.name: 1 for field in msgspec.structs.fields(EngineInfo) if field.name not in read
    }
    return EngineInfo(**read, **rest)


def echo(prompt: list[int], params: SamplingParams, index: int) -> list[int]:
    """The prompt again and again, sample `index` starting at its index-th token."""
    return [prompt[(index + at) % len(prompt)] for at in range(params.max_tokens)]


def vector_of(prompt: list[int], pooling: PoolingParams, labels: int) -> Vectors:
    """How many of its tokens leave which rest when divided by 8; of a model with a head, fewer of these."""
    counts = np.bincount(np.array(prompt[pooling.unpooled :]) % HIDDEN, minlength=HIDDEN).astype(np.float32)
    return finished(counts[: labels or HIDDEN], pooling)


def logprob(token: int, count: int, value: float = -0.5) -> TokenLogprob:
    """`value` for the token, which is also the best of `count` candidates; the others are its successors."""
    return TokenLogprob(
        token, value, 1, [token + at for at in range(count)], [value - at for at in range(count)]
    )


@dataclass
class FakeStream:
    engine: FakeEngine
    request_id: int
    prompt: list[int]
    params: SamplingParams
    cache_salt: str
    scripts: list[list[int]]
    done: list[int] = field(default_factory=list)  # tokens given, by index
    unfinished: set[int] = field(default_factory=set)
    outputs: list[Output] = field(default_factory=list)
    listener: Callable[[list[Output]], None] | None = None
    aborted: bool = False
    steps: int = 0  # of a beam search
    vector: Vectors | None = None  # what there is instead of tokens

    def listen(self, listener: Callable[[list[Output]], None]) -> None:
        self.listener = listener

    def tell(self) -> None:
        outputs, self.outputs = self.outputs, []
        if self.listener is not None:
            self.listener(outputs)

    def abort(self) -> None:
        self.listener = None  # as the real one: who listens has the stream
        if self.unfinished:
            self.aborted = True
            self.unfinished.clear()

    def end_sample(self, index: int) -> None:
        self.unfinished.discard(index)

    def push(self, output: Output) -> None:
        if output.finish_reason is not None:
            self.unfinished.discard(output.index)
        if not self.outputs:
            asyncio.get_running_loop().call_soon(self.tell)
        self.outputs.append(output)

    def step(self, eos: tuple[int, ...]) -> None:
        """One more token of every unfinished sequence; beams when the last of them has all its tokens."""
        if self.vector is not None:
            output = Output(self.request_id, 0, [], finish_reason="stop", queue_seconds=0.125)
            output.vector, output.cached_tokens = self.vector.tobytes(), self.engine.cached_tokens
            self.push(output)
            return
        if self.params.beam_width:
            self._search(eos)
            return
        for index in sorted(self.unfinished):
            at, params = self.done[index], self.params
            token = self.scripts[index][at]
            self.done[index] += 1
            first = not any(self.done) or self.done[index] == 1
            stops = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
            output = Output(self.request_id, index, [token], stop_token=token if stops else None)
            if stops:
                output.finish_reason = "stop"
            elif self.done[index] == params.max_tokens:
                output.finish_reason = "length"
            if params.logprobs is not None:
                value = self.engine.logprobs[index % len(self.engine.logprobs)]
                output.logprobs = [logprob(token, params.logprobs, value)]
            if first:
                output.queue_seconds = 0.125
                output.cached_tokens = self.engine.cached_tokens
                output.cached_host_tokens = self.engine.cached_host_tokens
                if params.prompt_logprobs is not None:
                    count = params.prompt_logprobs
                    output.prompt_logprobs = [None, *[logprob(token, count) for token in self.prompt[1:]]]
            self.push(output)

    def _search(self, eos: tuple[int, ...]) -> None:
        """Beam `index` says its script, with log-probability -1.5 * (index + 1)."""
        self.steps += 1
        ends = {*self.params.stop_token_ids, *(() if self.params.ignore_eos else eos)}
        beams = []
        for index, script in enumerate(self.scripts):
            length = next((at + 1 for at, token in enumerate(script) if token in ends), len(script))
            stop = script[length - 1] if script[length - 1] in ends else None
            reason: FinishReason = "length" if stop is None else "stop"
            beams.append(Output(self.request_id, index, script[:length], reason, stop))
            beams[-1].cumulative_logprob = -1.5 * (index + 1)
        beams[0].queue_seconds = 0.125
        if self.steps == max(len(beam.tokens) for beam in beams):
            for beam in beams:
                self.push(beam)


class FakeEngine:
    """`auto`: steps by itself once a turn of the loop; else only when `step` is called."""

    def __init__(self, info: EngineInfo, *, auto: bool = True, script: Script = echo) -> None:
        self._info = info
        self.info: EngineInfo | None = None
        self.state: Literal["loading", "ready", "dead"] = "loading"
        self.error: str | None = None
        self.on_stats: Callable[[StepStats], None] | None = None
        self.on_registry: Callable[[RegistryReport], None] | None = None
        self.on_record: Callable[[RequestRecord], None] | None = None
        self.progress: list[Progress] = []
        self.auto = auto
        self.script = script
        self.streams: list[FakeStream] = []
        self.stalled = 0.0
        self.cached_tokens = 0
        self.cached_host_tokens = 0
        self.logprobs = [-0.5]  # of every token of a sample, by its index
        self.stopped = False
        self.asked: list[Question] = []
        self.answers: dict[type, Answer] = {}  # instead of those of an engine that holds nothing
        self.draining = False
        self._changed = asyncio.Event()
        self._added = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None

    def report(self, progress: Progress) -> None:
        self.progress.append(progress)
        if progress.phase == "ready":
            self.info = self._info
            self.state = "ready"
        self._changed.set()

    def become_ready(self) -> FakeEngine:
        self.report(Progress(phase="ready", done=1, total=1, unit="engine", seconds=1.5))
        return self

    async def watch_progress(self) -> AsyncIterator[Progress]:
        seen = max(0, len(self.progress) - 1)
        while True:
            while seen < len(self.progress):
                yield self.progress[seen]
                seen += 1
            if self.state != "loading":
                return
            self._changed.clear()
            await self._changed.wait()

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        cache_salt: str = "",
        owner: str = "",
        pooling: PoolingParams | None = None,
    ) -> FakeStream:
        if self.state != "ready":
            raise EngineDeadError(self.error or "loading")
        self._info.capacity.check(Request(len(self.streams), prompt, params, pooling=pooling))
        scripts = [self.script(prompt, params, index)[: params.max_tokens] for index in range(params.n)]
        stream = FakeStream(self, len(self.streams) + 7, prompt, params, cache_salt, scripts)
        if pooling is not None and self._info.pooling is not None:
            stream.vector = vector_of(prompt, pooling, self._info.pooling.labels)
        stream.done = [0] * params.n
        stream.unfinished = set(range(params.n))
        self.streams.append(stream)
        self._added.set()
        if self.auto and (self._stepper is None or self._stepper.done()):
            self._stepper = asyncio.get_running_loop().create_task(self._run())
        return stream

    def tell_end(self, stream: FakeStream) -> None:
        """Say what became of a request, as a real engine does once it has ended: nothing took any time."""
        now = time.monotonic()
        tokens = len(stream.prompt), 0, 0
        record = Timeline(now).end(stream.request_id, now, "length", Company(), tokens)
        if self.on_record is not None:
            self.on_record(record)

    async def until_added(self, count: int) -> None:
        """Waits until it has been given so many requests."""
        while len(self.streams) < count:
            self._added.clear()
            await self._added.wait()

    async def _run(self) -> None:
        while self.active:
            self.step()
            await asyncio.sleep(0)

    @property
    def active(self) -> list[FakeStream]:
        return [stream for stream in self.streams if stream.unfinished]

    def step(self) -> None:
        active = self.active
        for stream in active:
            stream.step(self._info.eos_token_ids)
        if self.on_stats is not None:
            self.on_stats(self._stats(active))

    def _stats(self, active: list[FakeStream]) -> StepStats:
        host = (20, 21, 22) if self.info is not None and self.info.num_host_blocks else (0, 0, 0)
        return StepStats(
            free_blocks=self._info.num_blocks - 3,
            active_blocks=2,
            cached_blocks=1,
            block_references=4,
            tokens_filled=24,
            running=len(active),
            waiting=5,
            swapped=7,
            preemptions_recompute=6,
            preemptions_swap=12,
            host_free_blocks=host[0],
            host_active_blocks=host[1],
            host_cached_blocks=host[2],
            swap_out_blocks=23,
            swap_in_blocks=24,
            block_allocations=8,
            block_evictions=9,
            copy_on_write=10,
            prefill_tokens=11,
            decode_tokens=len(active),
            schedule_seconds=0.001,
            launch_seconds=0.002,
            wait_seconds=0.003,
            commit_seconds=0.004,
            requests_in_memory=13,
        )

    async def ask(self, question: Question) -> Answer | None:
        if self.state != "ready":
            raise EngineDeadError(self.error or "loading")
        self.asked.append(question)
        blocks, host = self._info.num_blocks, self._info.num_host_blocks
        pool = PoolAnswer(0.0, 0.0, blocks, host, 16, bytes(blocks + host), bytes(blocks + host), [], 0)
        nothing: dict[type, Answer] = {
            PoolQuestion: pool,
            BlockQuestion: BlockAnswer(FREE, 0, []),
            OwnQuestion: OwnAnswer(0, 0, 0, 0),
        }
        return (nothing | self.answers).get(type(question), PrefixAnswer(0.0, [], 0, 0, 0))

    def drain(self) -> None:
        self.draining = True

    def seconds_since_progress(self) -> float:
        return self.stalled

    def die(self, error: str) -> None:
        self.state = "dead"
        self.error = error
        self._end("error", error)
        self._changed.set()

    async def stop(self) -> None:
        self.stopped = True
        self._end("abort", None)
        self.state = "dead"
        self.error = self.error or "stopped"
        self._changed.set()

    def _end(self, reason: Literal["abort", "error"], error: str | None) -> None:
        for stream in self.active:
            for index in sorted(stream.unfinished):
                stream.push(Output(stream.request_id, index, [], finish_reason=reason, error=error))
