"""The engine in a process of its own: a frame for each command in, and one of outputs out for each step.

As `quire.engine.child` runs it, with the number of an inherited socket, over which it speaks length-prefixed
msgpack. The parent ends it by closing the socket.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from quire.engine import garbage
from quire.engine.core import EngineCore
from quire.engine.frames import (
    AnswerFrame,
    Ask,
    Command,
    FatalFrame,
    FrameReader,
    ProgressFrame,
    ReadyFrame,
    RegistryFrame,
    StartFrame,
    StepFrame,
    encode_frame,
)
from quire.engine.inspection.inspector import Inspector
from quire.engine.logs import configure_logging
from quire.engine.messages import Drain, Output, StepOutputs
from quire.engine.pinned_prefixes import pin_prefixes
from quire.engine.schedule.invariants import check_scheduler

if TYPE_CHECKING:
    from quire.engine.registry.kv_event_publisher import KVEventPublisher
    from quire.engine.registry.publisher import Publisher

logger = logging.getLogger("quire.engine")

CHECK_EVERY = 256  # steps between two runs of the scheduler's own consistency check
# Of the blocks and sequences, one a run in turn: all at once would hold up the streams for tens of ms.
CHECK_SHARES = tuple(slice(first, None, 16) for first in range(16))
# Of an engine on the CPU: where cores are few, the event loop that serves all streams goes first.
CPU_NICENESS = 5
REPORT_SECONDS = 0.5  # between two reports on the registry


def run_engine(connection: socket.socket) -> int:
    """Start the engine of the first frame and step it until the peer closes; return the exit code."""
    reader = FrameReader(connection)
    try:
        first, *frames = reader.read(wait=True)
    except EOFError:
        return 0
    start = msgspec.msgpack.decode(first, type=StartFrame)
    publisher: Publisher | None = None
    kv_events: KVEventPublisher | None = None
    try:
        # torch: not before the first frame could be refused
        from quire.engine.device.choice import choose_device
        from quire.engine.startup import start_engine

        if choose_device(start.config).type == "cpu":
            os.nice(CPU_NICENESS)  # before torch starts its threads, which inherit it
        core, info = start_engine(
            start.config,
            lambda progress: connection.sendall(encode_frame(ProgressFrame(progress))),
            start.asked_at,
            partial(_end_with_lost_rank, connection),
        )
        if start.pinned:
            info = msgspec.structs.replace(info, num_pinned_blocks=pin_prefixes(core, start.pinned))
        if start.registry is not None:
            from quire.engine.registry.publisher import start_publisher

            publisher = start_publisher(start.registry, start.config, info, core, start.pinned)
        if start.kv_events is not None:
            from quire.engine.registry.kv_event_publisher import start_kv_events

            kv_events = start_kv_events(start.kv_events, info.block_size, core)
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
        if kv_events is not None:
            kv_events.stop()
    return 0


def _end_with_lost_rank(connection: socket.socket, error: str) -> None:
    """End the process, whatever it is waiting for: a step that another rank takes part in never ends."""
    logger.error("the engine cannot go on: %s", error)
    with contextlib.suppress(OSError):
        connection.sendall(encode_frame(FatalFrame(error)))
    logging.shutdown()
    os._exit(1)


def _serve(
    connection: socket.socket,
    reader: FrameReader,
    core: EngineCore,
    frames: list[bytes],
    publisher: Publisher | None,
) -> None:
    decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
    inspector = Inspector(core)
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
        asked: list[Ask] = []
        for frame in frames:
            command = decoder.decode(frame)
            if isinstance(command, Ask):
                asked.append(command)
            elif not isinstance(command, Drain):
                refusals += core.handle(command)
            elif publisher is not None:
                publisher.drain()
        frames = []
        outputs = core.step()
        outputs.others += refusals
        connection.sendall(encode_frame(StepFrame(outputs, core.stats, core.records)))
        inspector.observe()
        for ask in asked:
            connection.sendall(encode_frame(_answer(inspector, ask)))
        if publisher is not None:
            publisher.observe(core.stats)
        steps += 1
        if steps % CHECK_EVERY == 0:
            check_scheduler(core.scheduler.state, CHECK_SHARES[steps // CHECK_EVERY % len(CHECK_SHARES)])
        garbage.collect(garbage.BUSY_OBJECTS if core.has_work else garbage.IDLE_OBJECTS)


def _answer(inspector: Inspector, ask: Ask) -> AnswerFrame:
    """Answer a question about blocks, whose failure is not the requests'."""
    try:
        return AnswerFrame(ask.ticket, inspector.answer(ask.question))
    except Exception:
        logger.exception("a question about blocks could not be answered")
        return AnswerFrame(ask.ticket, None)


def main() -> None:
    configure_logging()
    gc.disable()  # what imports make by the hundred thousand is no garbage
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.setblocking(True)
        code = run_engine(connection)
    logging.shutdown()
    os._exit(code)  # nothing is left to save, and tearing down CUDA and Triton takes a second or more


if __name__ == "__main__":
    main()
