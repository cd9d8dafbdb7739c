"""The engine in a process of its own: a frame for each command in, and one of outputs out for each step.

`python -m quire.engine.process FD` speaks length-prefixed msgpack over the inherited socket FD. The parent
ends it by closing the socket.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from quire.engine import garbage
from quire.engine.config import EngineConfig, EngineInfo, Progress, RegistryConfig, RegistryReport, StepStats
from quire.engine.core import EngineCore
from quire.engine.logs import configure_logging
from quire.engine.messages import Abort, Drain, Output, Request, StepOutputs
from quire.engine.pinned_prefixes import pin_prefixes
from quire.engine.schedule.invariants import check_scheduler

if TYPE_CHECKING:
    from quire.engine.registry.publisher import Publisher

logger = logging.getLogger("quire.engine")

LENGTH = struct.Struct("<I")
CHECK_EVERY = 256  # steps between two runs of the scheduler's own consistency check
# Of the blocks and sequences, one a run in turn: all at once would hold up the streams for tens of ms.
CHECK_SHARES = tuple(slice(first, None, 16) for first in range(16))
REPORT_SECONDS = 0.5  # between two reports on the registry


class StartFrame(msgspec.Struct, array_like=True):
    """Front end to engine, once: what to run, and where to tell others which blocks it has."""

    config: EngineConfig
    registry: RegistryConfig | None
    pinned: list[list[int]] = []  # token ids of prefixes that are computed at start and stay
    asked_at: float | None = None  # time.monotonic() of when the engine was asked for


class ProgressFrame(msgspec.Struct, array_like=True, tag="progress"):
    progress: Progress


class ReadyFrame(msgspec.Struct, array_like=True, tag="ready"):
    info: EngineInfo


class StepFrame(msgspec.Struct, array_like=True, tag="step"):
    outputs: StepOutputs
    stats: StepStats


class RegistryFrame(msgspec.Struct, array_like=True, tag="registry"):
    report: RegistryReport


class FatalFrame(msgspec.Struct, array_like=True, tag="fatal"):
    """The engine cannot go on; nothing follows."""

    error: str


Command = Request | Abort | Drain
EngineFrame = ProgressFrame | ReadyFrame | StepFrame | RegistryFrame | FatalFrame

_encoder = msgspec.msgpack.Encoder()


def encode_frame(frame: StartFrame | Command | EngineFrame) -> bytes:
    """The frame's bytes with their length before them."""
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
        """All whole frames that are there; with `wait`, at least one, unless `seconds` pass without any.

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


def run_engine(connection: socket.socket) -> int:
    """Start the engine that the first frame describes and step it until the peer closes; the exit code."""
    reader = FrameReader(connection)
    try:
        first, *frames = reader.read(wait=True)
    except EOFError:
        return 0
    start = msgspec.msgpack.decode(first, type=StartFrame)
    publisher = None
    try:
        from quire.engine.startup import start_engine  # torch: not before the first frame could be refused

        core, info = start_engine(
            start.config,
            lambda progress: connection.sendall(encode_frame(ProgressFrame(progress))),
            start.asked_at,
        )
        if start.pinned:
            info = msgspec.structs.replace(info, num_pinned_blocks=pin_prefixes(core, start.pinned))
        if start.registry is not None:
            from quire.engine.registry.publisher import start_publisher

            publisher = start_publisher(start.registry, start.config, info, core, start.pinned)
        garbage.keep_what_is_there()
        connection.sendall(encode_frame(StepFrame(StepOutputs(), core.stats)))
        connection.sendall(encode_frame(ReadyFrame(info)))
        _serve(connection, reader, core, frames, publisher)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        if not isinstance(error, ValueError):
            logger.exception("the engine cannot go on")
        with contextlib.suppress(OSError):
            connection.sendall(encode_frame(FatalFrame(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        if publisher is not None:
            publisher.stop()
    return 0


def _serve(
    connection: socket.socket,
    reader: FrameReader,
    core: EngineCore,
    frames: list[bytes],
    publisher: Publisher | None,
) -> None:
    decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
    steps, reported = 0, float("-inf")
    while True:
        idle = not core.has_work and not frames
        capturing = core.stats.graphs_left > 0
        wait = idle and not capturing
        frames += reader.read(wait=wait, seconds=None if publisher is None else REPORT_SECONDS)
        if publisher is not None and time.monotonic() - reported >= REPORT_SECONDS:
            connection.sendall(encode_frame(RegistryFrame(publisher.report())))
            reported = time.monotonic()
        if not frames and not core.has_work:
            if capturing and not core.capture():
                connection.sendall(encode_frame(StepFrame(StepOutputs(), core.stats)))
            continue
        refusals: list[Output] = []
        for frame in frames:
            command = decoder.decode(frame)
            if not isinstance(command, Drain):
                refusals += core.handle(command)
            elif publisher is not None:
                publisher.drain()
        frames = []
        outputs = core.step()
        outputs.others += refusals
        connection.sendall(encode_frame(StepFrame(outputs, core.stats)))
        if publisher is not None:
            publisher.observe(core.stats)
        steps += 1
        if steps % CHECK_EVERY == 0:
            check_scheduler(core.scheduler.state, CHECK_SHARES[steps // CHECK_EVERY % len(CHECK_SHARES)])
        garbage.collect(garbage.BUSY_OBJECTS if core.has_work else garbage.IDLE_OBJECTS)


def main() -> None:
    configure_logging()
    for told in (signal.SIGINT, signal.SIGTERM):  # which reach a whole group: the parent decides, and drains
        signal.signal(told, signal.SIG_IGN)
    gc.disable()  # what imports make by the hundred thousand is no garbage
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.setblocking(True)
        code = run_engine(connection)
    logging.shutdown()
    os._exit(code)  # nothing is left to save, and tearing down CUDA and Triton takes a second or more


if __name__ == "__main__":
    main()
