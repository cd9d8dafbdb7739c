"""A rank other than 0 in its process: builds its part of the model, and launches what rank 0 tells.

As `quire.engine.child` runs it, with the number of an inherited socket to rank 0, which ends it by closing
that.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
from collections import deque

import msgspec
import torch.distributed as dist

from quire.engine import garbage
from quire.engine.device.choice import choose_device
from quire.engine.device.runner import ModelRunner
from quire.engine.device.streams import CudaHandle, ThreadHandle
from quire.engine.frames import FatalFrame, FrameReader, RankStart, encode_frame
from quire.engine.logs import configure_logging
from quire.engine.parallel.channel import Reader
from quire.engine.parallel.digest import TokenDigest
from quire.engine.parallel.frames import Capture, decode
from quire.engine.parallel.group import RankGroup
from quire.engine.rank import build_rank

logger = logging.getLogger("quire.engine")

SPIN_SECONDS = 5e-4  # after a step, of a rank with a GPU


def follow(connection: socket.socket) -> int:
    """Run a rank until rank 0 is gone; return the exit code."""
    try:
        (first,) = FrameReader(connection).read(wait=True)
    except EOFError:
        return 0
    threading.Thread(target=_end_with, args=(connection,), name="quire-rank-0", daemon=True).start()
    start = msgspec.msgpack.decode(first, type=RankStart)
    rank, size = start.rank, start.config.tensor_parallel_size
    peers = not start.config.disable_custom_all_reduce
    try:
        device = choose_device(start.config, rank)
        spin = SPIN_SECONDS if device.type == "cuda" and has_cores_for(size) else 0.0
        frames = Reader(start.channel, rank - 1, size - 1, spin)
        group = RankGroup(rank, size, device, dist.FileStore(start.store, size), with_peers=peers)
        runner = build_rank(start.config, device, group).runner
        garbage.keep_what_is_there()
        _serve(frames, runner)
    except Exception as error:
        if not isinstance(error, ValueError):
            logger.exception("rank %d cannot go on", rank)
        with contextlib.suppress(OSError):
            connection.sendall(encode_frame(FatalFrame(f"rank {rank}: {type(error).__name__}: {error}")))
    return 1


def has_cores_for(ranks: int) -> bool:
    """Return whether each rank, and the process of the API, may keep a core of this machine busy."""
    return len(os.sched_getaffinity(0)) > ranks


def _serve(frames: Reader, runner: ModelRunner) -> None:
    """Launch each step as it is told, and wait for those before the last one."""
    in_flight: deque[CudaHandle | ThreadHandle] = deque()
    moving: deque[tuple[int, CudaHandle | ThreadHandle]] = deque()
    launched, digest = 0, TokenDigest()
    while True:
        message = decode(frames.receive(lambda: any(not handle.arrived(0.0) for handle in in_flight)))
        if isinstance(message, Capture):
            runner.capture(missed=message.missed)
            continue
        while moving and moving[0][0] <= message.booked:
            runner.order_after(moving.popleft()[1])
        handle = runner.launch(message.plan)
        launched += 1
        if len(message.plan.swap_out) or len(message.plan.swap_in):
            moving.append((launched, handle))
        in_flight.append(handle)
        if len(in_flight) > 1:
            mark = digest.add(in_flight.popleft().wait())
            if mark is not None:
                frames.tell(mark)
            garbage.collect(garbage.BUSY_OBJECTS)


def _end_with(connection: socket.socket) -> None:
    """End this process as soon as rank 0 has closed the connection, whatever it is waiting for."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os._exit(0)


def main() -> None:
    configure_logging()
    gc.disable()  # what imports make by the hundred thousand is no garbage
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.setblocking(True)
        code = follow(connection)
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
