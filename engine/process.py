"""The engine in a process of its own: one frame of commands in, one frame of outputs out, per step.

`python -m engine.process FD` speaks length-prefixed msgpack over the inherited socket FD. The parent ends it
by closing the socket.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import struct
import sys

import msgspec

from engine.config import EngineConfig, EngineInfo, Progress, StepStats
from engine.core import EngineCore
from engine.request import Abort, Output, Request

logger = logging.getLogger("quire.engine")

LENGTH = struct.Struct("<I")
CHECK_EVERY = 4096  # steps between two runs of the scheduler's own consistency check


class CommandFrame(msgspec.Struct, array_like=True):
    """Front end to engine."""

    commands: list[Request | Abort]


class ProgressFrame(msgspec.Struct, array_like=True, tag="progress"):
    progress: Progress


class ReadyFrame(msgspec.Struct, array_like=True, tag="ready"):
    info: EngineInfo


class StepFrame(msgspec.Struct, array_like=True, tag="step"):
    outputs: list[Output]
    stats: StepStats


class FatalFrame(msgspec.Struct, array_like=True, tag="fatal"):
    """The engine cannot go on; nothing follows."""

    error: str


EngineFrame = ProgressFrame | ReadyFrame | StepFrame | FatalFrame

_encoder = msgspec.msgpack.Encoder()


def encode_frame(frame: CommandFrame | EngineFrame | EngineConfig) -> bytes:
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

    def read(self, *, wait: bool) -> list[bytes]:
        """All whole frames that are there; with `wait`, at least one. EOFError: the peer is gone."""
        frames: list[bytes] = []
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
    config = msgspec.msgpack.decode(first, type=EngineConfig)
    try:
        from engine.startup import start_engine  # torch: not before the first frame could be refused

        core, info = start_engine(
            config, lambda progress: connection.sendall(encode_frame(ProgressFrame(progress)))
        )
        connection.sendall(encode_frame(ReadyFrame(info)))
        _serve(connection, reader, core, frames)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        if not isinstance(error, ValueError):
            logger.exception("the engine cannot go on")
        with contextlib.suppress(OSError):
            connection.sendall(encode_frame(FatalFrame(f"{type(error).__name__}: {error}")))
        return 1
    return 0


def _serve(connection: socket.socket, reader: FrameReader, core: EngineCore, frames: list[bytes]) -> None:
    decoder = msgspec.msgpack.Decoder(CommandFrame)
    _collect_garbage_when_idle()
    steps = 0
    while True:
        frames += reader.read(wait=not core.has_work and not frames)
        outputs = [
            output
            for frame in frames
            for command in decoder.decode(frame).commands
            for output in core.handle(command)
        ]
        frames = []
        outputs += core.step()
        connection.sendall(encode_frame(StepFrame(outputs, core.stats)))
        steps += 1
        if steps % CHECK_EVERY == 0:
            core.scheduler.check()
        if not core.has_work:
            gc.collect(1)


def _collect_garbage_when_idle() -> None:
    """A full collection over the model's objects takes milliseconds: never in the middle of a step."""
    gc.collect()
    gc.freeze()
    gc.disable()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.setblocking(True)
        code = run_engine(connection)
    logging.shutdown()
    os._exit(code)  # nothing is left to save, and tearing down CUDA and Triton takes a second or more


if __name__ == "__main__":
    main()
