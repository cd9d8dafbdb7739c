"""Real processes: the API process while its engine process dies or sticks, and while signals end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from service.descriptors import RESERVED

ROOT = Path(__file__).parents[2]
STREAMS = 16
SECONDS = 60


@dataclass
class Server:
    """`loadtest.modelless`: all of the API process, and an engine process without a model."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def engine(self) -> int:
        """The engine's process id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (engine,) = map(int, children)
        return engine

    def status(self, path: str) -> int:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=SECONDS).status_code

    def wait(self, path: str, status: int) -> None:
        until = time.monotonic() + SECONDS
        while self.status(path) != status:
            assert time.monotonic() < until, f"{path} never became {status}"
            time.sleep(0.02)

    def stream(self, tokens: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return connection


@contextlib.contextmanager
def modelless(*flags: str, descriptors: int | None = None) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "loadtest.modelless", "--port", str(port), *flags]
    if descriptors is not None:
        limits = f'ulimit -Sn {descriptors}; ulimit -Hn {descriptors}; exec "$@"'
        command = ["bash", "-c", limits, "-", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    server = Server(process, port)
    try:
        until = time.monotonic() + SECONDS
        while True:
            assert process.poll() is None and time.monotonic() < until
            with contextlib.suppress(httpx.TransportError):
                if server.status("/ready") == 200:
                    break
            time.sleep(0.05)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):  # both have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def streaming(server: Server, tokens: int) -> Iterator[list[socket.socket]]:
    """So many streams, each of which has had its first token."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(server.stream(tokens)) for _ in range(STREAMS)]
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
    """/health says it while it lasts; nothing is lost when it goes on."""
    with modelless("--step-ms", "20", "--stall-timeout", "0.5") as server:
        with streaming(server, 40) as running:
            engine = server.engine
            os.kill(engine, signal.SIGSTOP)
            server.wait("/health", 503)
            os.kill(engine, signal.SIGCONT)
            server.wait("/health", 200)
            assert terminal_events(running) == ["[DONE]"] * STREAMS
        assert server.status("/health") == 200  # idle is no stall
        drains_when_it_is_told_to(server)


def drains_when_it_is_told_to(server: Server) -> None:
    with streaming(server, 40) as running:
        server.process.send_signal(signal.SIGTERM)
        assert terminal_events(running) == ["[DONE]"] * STREAMS
    assert server.process.wait(SECONDS) == 0


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
