"""Real processes: the API process while its engine process dies or sticks, and while signals end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import uvloop

from quire.engine.client import AsyncEngine
from quire.engine.config import EngineConfig
from quire.engine.messages import SamplingParams
from quire.engine.process import CPU_NICENESS
from quire.service.demo import MODEL_FOLDER
from quire.service.http.descriptors import RESERVED
from tests.service.processes import SECONDS, Server, serving

STREAMS = 16


def modelless(*flags: str, descriptors: int | None = None) -> AbstractContextManager[Server]:
    """All of the API process, and an engine process without a model."""
    return serving("quire.loadtest.servers.modelless", *flags, descriptors=descriptors)


@contextlib.contextmanager
def streaming(server: Server, tokens: int) -> Iterator[list[socket.socket]]:
    """So many streams, each of which has had its first token."""
    with contextlib.ExitStack() as stack:
        body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": True}).encode()
        running = [stack.enter_context(server.post("/v1/completions", body)) for _ in range(STREAMS)]
        for connection in running:
            assert connection.recv(1, socket.MSG_PEEK)
        yield running


def terminal_events(running: list[socket.socket]) -> list[str]:
    """The last event of each stream; there is one such event in it, and the connection ends in order."""
    last = []
    for connection in running:
        data = b""
        while part := connection.recv(65536):
            data += part
        assert data.endswith(b"\n\n\r\n0\r\n\r\n")
        events = [part.split(b"\n\n")[0].decode() for part in data.split(b"data: ")[1:]]
        assert sum(event == "[DONE]" or event.startswith('{"error"') for event in events) == 1
        last.append(events[-1])
    return last


def test_engine_that_is_killed() -> None:
    """Every stream ends with an error event, and the process with a status that says so."""
    with modelless("--step-ms", "20") as server, streaming(server, 100_000) as running:
        os.kill(server.engine, signal.SIGKILL)
        for event in terminal_events(running):
            assert "engine process ended unexpectedly" in json.loads(event)["error"]["message"]
        assert server.process.wait(SECONDS) == 1


def test_engine_that_sticks() -> None:
    """Every stream ends with an error event; when it goes on, so does the server."""
    with modelless("--step-ms", "20", "--stall-timeout", "1") as server:
        with streaming(server, 100_000) as running:
            os.kill(server.engine, signal.SIGSTOP)
            for event in terminal_events(running):
                assert json.loads(event)["error"]["code"] == "engine_stalled"
        for path in ("/health", "/ready"):
            assert server.status(path) == 503
        os.kill(server.engine, signal.SIGCONT)
        for path in ("/health", "/ready"):
            server.wait(path, 200)
        drains_when_it_is_told_to(server)


def drains_when_it_is_told_to(server: Server) -> None:
    with streaming(server, 40) as running:
        server.process.send_signal(signal.SIGTERM)
        assert terminal_events(running) == ["[DONE]"] * STREAMS
    assert server.process.wait(SECONDS) == 0


def test_signal_while_the_engine_sticks() -> None:
    """There is nothing to wait for."""
    with (
        modelless("--step-ms", "20", "--stall-timeout", "1") as server,
        streaming(server, 100_000) as running,
    ):
        os.kill(server.engine, signal.SIGSTOP)
        terminal_events(running)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SECONDS) == 0


def test_server_that_was_stopped_as_a_whole() -> None:
    """As a shell stops a job or a container is paused: nothing is lost, whatever time went by."""
    with modelless("--step-ms", "20", "--stall-timeout", "2") as server, streaming(server, 100) as running:
        os.killpg(server.process.pid, signal.SIGSTOP)
        time.sleep(3)
        os.killpg(server.process.pid, signal.SIGCONT)
        assert terminal_events(running) == ["[DONE]"] * STREAMS


def test_second_signal_ends_streams_at_once() -> None:
    with modelless("--step-ms", "20") as server, streaming(server, 100_000) as running:
        server.process.send_signal(signal.SIGTERM)
        server.wait("/ready", 503)
        server.process.send_signal(signal.SIGTERM)
        for event in terminal_events(running):
            assert json.loads(event)["error"]["code"] == "not_ready"
        assert server.process.wait(SECONDS) == 0


def test_few_file_descriptors_never_run_out() -> None:
    """Connections beyond what they allow get a 503; those that are there, and the process, go on."""
    with modelless(descriptors=200) as server, contextlib.ExitStack() as stack:
        statuses = []
        for _ in range(150):
            connection = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
            )
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            statuses.append(connection.recv(4096)[:12])
        most = (200 - RESERVED) // 2
        assert set(statuses[: most - 2]) == {b"HTTP/1.1 200"}  # but for what asked whether it is ready
        assert set(statuses[most:]) == {b"HTTP/1.1 503"}
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 200 - RESERVED // 2
        stack.close()
        server.wait("/health", 200)


def test_commands_to_an_engine_that_has_just_gone_are_lost_quietly() -> None:
    """uvloop raises for what is written to a lost connection; that the engine is gone is told by its end."""

    async def abort_all() -> None:
        engine = AsyncEngine(
            EngineConfig(model=MODEL_FOLDER), program=("quire.loadtest.servers.token_source", "1000", "4")
        )
        await engine.start()
        async for _ in engine.watch_progress():
            pass
        streams = [engine.add([5], SamplingParams(max_tokens=50)) for _ in range(3)]
        assert engine._writer is not None and engine._process is not None
        engine._process.send_signal(signal.SIGSTOP)  # so that it is not heard of as ended
        engine._writer.transport.abort()
        for _ in range(3):
            await asyncio.sleep(0)
        assert engine.state == "ready"
        for stream in streams:
            stream.abort()
        assert not engine._streams
        engine.drain()
        engine._process.send_signal(signal.SIGCONT)
        await engine.stop()

    uvloop.run(abort_all())


def test_an_engine_on_the_cpu_lets_the_event_loop_go_first() -> None:
    async def niceness() -> int:
        engine = AsyncEngine(
            EngineConfig(model=MODEL_FOLDER, device="cpu", num_gpu_blocks_override=64, swap_space=0)
        )
        await engine.start()
        async for _ in engine.watch_progress():
            pass
        assert engine._process is not None
        found = os.getpriority(os.PRIO_PROCESS, engine._process.pid)
        await engine.stop()
        return found

    assert uvloop.run(niceness()) == min(os.getpriority(os.PRIO_PROCESS, 0) + CPU_NICENESS, 19)
