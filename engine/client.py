"""AsyncEngine: the engine as the API process sees it, an asyncio task that pumps frames."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from quire.engine import child, frames
from quire.engine.capacity import Capacity
from quire.engine.config import (
    EngineConfig,
    EngineInfo,
    KVEventsConfig,
    Progress,
    RegistryConfig,
    RegistryReport,
    StepStats,
)
from quire.engine.errors import EngineDeadError
from quire.engine.inspection.messages import Answer, Question
from quire.engine.messages import (
    Abort,
    Drain,
    EndSample,
    FinishReason,
    PoolingParams,
    Request,
    SamplingParams,
)
from quire.engine.records import RequestRecord
from quire.engine.request_stream import RequestStream

logger = logging.getLogger("quire.engine")

TURN_SECONDS = 0.005  # for which frames are read before what they brought is told, and others have their turn
EXIT_CODE_SECONDS = 0.5  # for which streams wait to be told with which code it has ended
EXIT_SECONDS = 5.0  # how long the engine process may take to end before it is killed


class AsyncEngine:
    """Runs EngineCore in a process of its own. All methods belong to the event loop that called `start`."""

    def __init__(
        self,
        config: EngineConfig,
        registry: RegistryConfig | None = None,
        pinned: list[list[int]] | None = None,
        program: tuple[str, ...] = ("quire.engine.process",),
        kv_events: KVEventsConfig | None = None,
    ) -> None:
        """With a `registry`, the engine tells there which blocks can be found in its prefix cache.

        kv_events: where else it tells that, as vLLM does.
        pinned: token ids of prefixes that are computed at start, stay in the cache and are every tenant's.
        program: the module that is the engine process, and arguments that come before the socket's.
        """
        self.config = config
        self.registry = registry
        self.kv_events = kv_events
        self.pinned = pinned or []
        self.program = program
        self.state: Literal["loading", "ready", "dead"] = "loading"
        self.error: str | None = None
        self.info: EngineInfo | None = None
        self._capacity: Capacity  # of `info`
        self.progress: list[Progress] = []
        self.on_stats: Callable[[StepStats], None] | None = None
        self.on_registry: Callable[[RegistryReport], None] | None = None
        self.on_record: Callable[[RequestRecord], None] | None = None
        self._streams: dict[int, RequestStream] = {}
        self._next_id = 0
        self._answers: dict[int, asyncio.Future[Answer | None]] = {}  # that are waited for, by ticket
        self._next_ticket = 0
        self._told: list[RequestStream] = []  # whose listeners are to be called in this turn of the loop
        self._turn_began = 0.0  # by the loop's clock, when there were any
        self._changed = asyncio.Event()
        self._last_step = time.monotonic()
        self._unanswered = False  # whether a command was sent since; each is followed by a step
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pump_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine process; returns at once, `state` and `watch_progress` tell how it goes."""
        asked_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *child.command(*self.program, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        start = frames.StartFrame(self.config, self.registry, self.pinned, asked_at, self.kv_events)
        self._writer.write(frames.encode_frame(start))
        self._pump_task = asyncio.create_task(self._pump(reader), name="quire-engine-pump")

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        cache_salt: str = "",
        owner: str = "",
        pooling: PoolingParams | None = None,
    ) -> RequestStream:
        """Queue a request; what is cached with salts of the same `owner` may be told of it.

        pooling: it is one for a vector, with POOLED as params.

        Raise FieldError when it could never run, EngineDeadError when none is served.
        """
        if self.state != "ready" or self.info is None:
            raise EngineDeadError(self.error or "the engine is still loading")
        request = Request(self._next_id, prompt, params, time.monotonic(), cache_salt, owner, pooling)
        self._capacity.check(request)
        self._next_id += 1
        self._send(request)
        stream = self._streams[request.id] = RequestStream(
            request, self._tell_soon, self._abort, self._end_sample
        )
        return stream

    async def ask(self, question: Question) -> Answer | None:
        """Return the answer to a question about blocks, None if it fails. Raises EngineDeadError."""
        if self.state != "ready":
            raise EngineDeadError(self.error or "the engine is still loading")
        ticket = self._next_ticket
        self._next_ticket += 1
        answer = self._answers[ticket] = self._loop.create_future()
        self._send(frames.Ask(ticket, question))
        try:
            return await answer
        finally:
            del self._answers[ticket]

    def drain(self) -> None:
        """Tell the engine that no more requests are going to come; those that run go on."""
        if self.state == "ready":
            self._send(Drain())

    def seconds_since_progress(self) -> float:
        """Return the seconds that the engine has been without a step although it has work.

        Commands that it has not been seen to obey are work, too: after a stall it has to hear of the aborts.
        """
        return time.monotonic() - self._last_step if self._has_work else 0.0

    @property
    def _has_work(self) -> bool:
        return bool(self._streams) or self._unanswered

    async def watch_progress(self) -> AsyncIterator[Progress]:
        """Yield the newest start-up event, and those that follow, until the engine is ready or dead."""
        seen = max(0, len(self.progress) - 1)
        while True:
            while seen < len(self.progress):
                yield self.progress[seen]
                seen += 1
            if self.state != "loading":
                return
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """End the engine process; open streams end with "abort".

        One that still loads listens to nobody, and has nothing to lose: it is killed at once.
        """
        is_loading = self.state == "loading"
        self._end_streams("abort")
        if self._pump_task is not None:
            self._pump_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump_task
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            if is_loading:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            try:
                async with asyncio.timeout(EXIT_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._die("the engine was stopped")

    # -- the pump -------------------------------------------------------------------------------------

    async def _pump(self, reader: asyncio.StreamReader) -> None:
        decoder: msgspec.msgpack.Decoder[frames.EngineFrame] = msgspec.msgpack.Decoder(frames.EngineFrame)
        try:
            while True:
                (length,) = frames.LENGTH.unpack(await reader.readexactly(frames.LENGTH.size))
                self._receive(decoder.decode(await reader.readexactly(length)))
                if self._told and self._loop.time() - self._turn_began > TURN_SECONDS:
                    await asyncio.sleep(0)  # an engine that is faster than we are always has more
        except (asyncio.IncompleteReadError, ConnectionError):
            assert self._process is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_CODE_SECONDS):
                    await self._process.wait()
            code = self._process.returncode
            self._die(f"the engine process ended unexpectedly (exit code {code})")
        except Exception as error:  # such as two threads' frames in one another, as a process ends
            logger.exception("a frame of the engine cannot be understood")
            self._die(f"a frame of the engine cannot be understood ({error!r})")

    def _receive(self, frame: frames.EngineFrame) -> None:
        match frame:
            case frames.StepFrame(outputs, stats, records):
                self._last_step = time.monotonic()
                self._unanswered = False
                streams = self._streams
                columns = zip(outputs.request_ids, outputs.indices, outputs.tokens, strict=True)
                for request_id, index, token in columns:
                    stream = streams.get(request_id)
                    if stream is not None:
                        stream.push_token(index, token)
                for output in outputs.others:
                    stream = streams.get(output.request_id)
                    if stream is not None:
                        stream.push(output)
                        if stream.finished:
                            del self._streams[output.request_id]
                if self.on_stats is not None:
                    self.on_stats(stats)
                if self.on_record is not None:
                    for record in records:
                        self.on_record(record)
            case frames.ProgressFrame(progress):
                self.progress.append(progress)
            case frames.ReadyFrame(info):
                self.info = info
                self._capacity = info.capacity
                self.state = "ready"
            case frames.RegistryFrame(report):
                if self.on_registry is not None:
                    self.on_registry(report)
            case frames.AnswerFrame(ticket, answer):
                waiter = self._answers.get(ticket)
                if waiter is not None and not waiter.done():
                    waiter.set_result(answer)
            case frames.FatalFrame(error):
                self._die(error)
        self._changed.set()

    def _die(self, error: str) -> None:
        if self.state == "dead":
            return
        self.state = "dead"
        self.error = error
        self._unanswered = False
        self._end_streams("error", error)
        for waiter in self._answers.values():
            if not waiter.done():
                waiter.set_exception(EngineDeadError(error))
        self._changed.set()

    def _end_streams(self, reason: FinishReason, error: str | None = None) -> None:
        for stream in self._streams.values():
            stream.end(reason, error)
        self._streams.clear()

    def _abort(self, stream: RequestStream) -> None:
        stream.forget()
        if stream.request_id in self._streams:
            self._send(Abort(stream.request_id))
            del self._streams[stream.request_id]

    def _end_sample(self, stream: RequestStream, index: int) -> None:
        if stream.request_id in self._streams:
            self._send(EndSample(stream.request_id, index))

    def _tell_soon(self, stream: RequestStream) -> None:
        """When all frames that are there have been read: what has piled up is told as one."""
        if not self._told:
            self._loop.call_soon(self._tell)
            self._turn_began = self._loop.time()
        self._told.append(stream)

    def _tell(self) -> None:
        streams, self._told = self._told, []
        for stream in streams:
            stream.tell()

    def _send(self, command: frames.Command) -> None:
        """At once, so that the engine has it a turn earlier; uvloop sends as one what a turn writes.

        Of an engine that is gone, which `_die` will hear of soon, nobody reads it.
        """
        assert self._writer is not None
        if not self._has_work:
            self._last_step = time.monotonic()
        self._unanswered = True
        if not self._writer.is_closing():  # uvloop would raise
            self._writer.write(frames.encode_frame(command))
