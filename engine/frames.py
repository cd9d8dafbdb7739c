"""The frames between the front end and the engine process: msgpack, each after its length."""

from __future__ import annotations

import select
import socket
import struct

import msgspec

from quire.engine.config import (
    EngineConfig,
    EngineInfo,
    KVEventsConfig,
    Progress,
    RegistryConfig,
    RegistryReport,
    StepStats,
)
from quire.engine.inspection.messages import Answer, Question
from quire.engine.messages import Abort, Drain, EndSample, Request, StepOutputs
from quire.engine.records import RequestRecord

LENGTH = struct.Struct("<I")


class StartFrame(msgspec.Struct, array_like=True):
    """Front end to engine, once: what to run, and where to tell others which blocks it has."""

    config: EngineConfig
    registry: RegistryConfig | None
    pinned: list[list[int]] = []  # token ids of prefixes that are computed at start and stay
    asked_at: float | None = None  # time.monotonic() of when the engine was asked for
    kv_events: KVEventsConfig | None = None


class ProgressFrame(msgspec.Struct, array_like=True, tag="progress"):
    progress: Progress


class ReadyFrame(msgspec.Struct, array_like=True, tag="ready"):
    info: EngineInfo


class StepFrame(msgspec.Struct, array_like=True, tag="step"):
    outputs: StepOutputs
    stats: StepStats
    records: list[RequestRecord] = []  # of requests that have ended, which an abort does too


class RegistryFrame(msgspec.Struct, array_like=True, tag="registry"):
    report: RegistryReport


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Front end to engine: a question about its blocks. The answer has the same ticket."""

    ticket: int
    question: Question


class AnswerFrame(msgspec.Struct, array_like=True, tag="answer"):
    ticket: int
    answer: Answer | None  # None: the engine failed to find it, and goes on


class FatalFrame(msgspec.Struct, array_like=True, tag="fatal"):
    """The engine cannot go on; nothing follows."""

    error: str


class RankStart(msgspec.Struct, array_like=True):
    """Rank 0 to another, once: who it is, and what it is to run."""

    config: EngineConfig
    rank: int
    store: str  # the file through which ranks find each other
    channel: int  # file descriptor of the channel's memory


Command = Request | Abort | EndSample | Drain | Ask
EngineFrame = ProgressFrame | ReadyFrame | StepFrame | RegistryFrame | AnswerFrame | FatalFrame

_encoder = msgspec.msgpack.Encoder()


def encode_frame(frame: StartFrame | RankStart | Command | EngineFrame) -> bytes:
    """Return the frame's bytes with their length before them."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(frame, buffer, LENGTH.size)
    LENGTH.pack_into(buffer, 0, len(buffer) - LENGTH.size)
    return bytes(buffer)


class FrameReader:
    """Splits a socket's bytes into frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def read(self, *, wait: bool, seconds: float | None = None) -> list[bytes]:
        """Read all whole frames that are there; with `wait`, at least one, unless `seconds` pass without any.

        EOFError: the peer is gone.
        """
        frames: list[bytes] = []
        if wait and seconds is not None and not select.select([self._connection], [], [], seconds)[0]:
            return frames
        while True:
            try:
                data = self._connection.recv(1 << 20, 0 if wait and not frames else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return frames
            if not data:
                raise EOFError
            self._buffer += data
            frames += self._split()

    def _split(self) -> list[bytes]:
        frames, begin = [], 0
        while len(self._buffer) - begin >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, begin)
            end = begin + LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[begin + LENGTH.size : end]))
            begin = end
        del self._buffer[:begin]
        return frames
