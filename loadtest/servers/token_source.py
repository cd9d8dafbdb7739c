"""An engine process that has no model.

`python -m quire.loadtest.servers.token_source STEP_MS SEQUENCES SOCKET`

It speaks the engine's frames and runs SEQUENCES at once, first come, first served; a step gives each one
token and takes STEP_MS (0: as fast as they are read). To the API process it is an engine like any other.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass

import msgspec

from quire.engine.config import EngineConfig, EngineInfo, Progress, StepStats
from quire.engine.frames import (
    Command,
    FrameReader,
    ProgressFrame,
    ReadyFrame,
    StartFrame,
    StepFrame,
    encode_frame,
)
from quire.engine.messages import Abort, Output, Request, StepOutputs

MAX_MODEL_LEN = 1 << 20
VOCAB_SIZE = 4096  # the demo model's, so that any text can be a prompt
PLAIN_TOKENS = range(300, 1324)  # of these: text, nothing special


def engine_info(config: EngineConfig, sequences: int) -> EngineInfo:
    """Return what an engine would say that has memory for anything."""
    return EngineInfo(
        model=config.model,
        architecture="none",
        dtype="none",
        kv_cache_dtype="none",
        device="none",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        num_blocks=1 << 24,
        num_host_blocks=0,
        max_num_seqs=sequences,
        max_num_batched_tokens=1 << 20,
        bytes_per_block=1,
        weight_bytes=1,
        layer_weights=1,
        query_width=1,
        windows=(0,),
        body_weight_bytes=1,
        head_weight_bytes=1,
    )


@dataclass
class Running:
    """A request's only sequence: what it will say, and how many tokens are left."""

    tokens: itertools.cycle[int]
    left: int


class TokenSource:
    """Requests in, a token for each that runs out."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Running] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def handle(self, command: Command) -> None:
        if isinstance(command, Request):
            self._waiting.append(command)
        elif isinstance(command, Abort) and self._running.pop(command.id, None) is None:
            self._waiting = deque(each for each in self._waiting if each.id != command.id)

    def step(self) -> StepFrame:
        """Give one token each. First and last ones are told as outputs of their own, as an engine does."""
        outputs = StepOutputs()
        while self._waiting and len(self._running) < self._sequences:
            request = self._waiting.popleft()
            spread = PLAIN_TOKENS[request.id % len(PLAIN_TOKENS) :]  # no two say the same at once
            self._running[request.id] = Running(itertools.cycle(spread), request.params.max_tokens - 1)
            seconds = time.monotonic() - request.arrival
            outputs.others.append(Output(request.id, 0, [PLAIN_TOKENS.start], queue_seconds=seconds))
        for request_id, running in list(self._running.items()):
            token = next(running.tokens)
            running.left -= 1
            if running.left > 0:
                outputs.request_ids.append(request_id)
                outputs.indices.append(0)
                outputs.tokens.append(token)
            else:
                del self._running[request_id]
                outputs.others.append(Output(request_id, 0, [token], finish_reason="length"))
        return StepFrame(outputs, self.stats())

    def stats(self) -> StepStats:
        values = dict.fromkeys((field.name for field in msgspec.structs.fields(StepStats)), 0)
        values |= {"running": len(self._running), "waiting": len(self._waiting), "free_blocks": 1 << 24}
        return StepStats(**values)


def main() -> None:
    step_ms, sequences, descriptor = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    gc.freeze()
    with socket.socket(fileno=descriptor) as connection:
        connection.setblocking(True)
        try:
            serve(connection, TokenSource(sequences), step_ms / 1000)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            os._exit(0)


def serve(connection: socket.socket, source: TokenSource, seconds: float) -> None:
    """Serve until the peer is gone, which is an error."""
    reader = FrameReader(connection)
    first, *frames = reader.read(wait=True)
    config = msgspec.msgpack.decode(first, type=StartFrame).config
    ready = Progress(phase="ready", done=1, total=1, unit="engine", seconds=0.0)
    connection.sendall(encode_frame(ReadyFrame(engine_info(config, source._sequences))))
    connection.sendall(encode_frame(ProgressFrame(ready)))
    decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
    due = time.monotonic()
    while True:
        frames += reader.read(wait=not source.has_work)
        for frame in frames:
            source.handle(decoder.decode(frame))
        frames = []
        due = max(due + seconds, time.monotonic())
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)
        connection.sendall(encode_frame(source.step()))


if __name__ == "__main__":
    main()
