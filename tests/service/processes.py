"""The server as processes, whose engine process can be stopped and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from quire.loadtest.servers.server_process import free_port
from tests.waiting import SECONDS, until

ROOT = Path(__file__).parents[2]


def _command(process: str) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> int:
        """The engine's process id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (engine,) = (
            child for child in children if b"quire.service.text.template_worker" not in _command(child)
        )
        return int(engine)

    def status(self, path: str) -> int:
        return httpx.get(self.url + path, timeout=SECONDS).status_code

    def wait(self, path: str, status: int) -> None:
        until(lambda: self.status(path) == status, f"{path} is {status}")

    def post(self, path: str, data: bytes, headers: str = "") -> socket.socket:
        """Of a request that is on its way; the server closes when it has answered."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection


@contextlib.contextmanager
def serving(module: str, *flags: str, descriptors: int | None = None) -> Iterator[Server]:
    """`module` with these flags and a port, once it is ready. All of it is killed at the end."""
    port = free_port()
    command = [sys.executable, "-m", module, *flags, "--port", str(port)]
    if descriptors is not None:
        limits = f'ulimit -Sn {descriptors}; ulimit -Hn {descriptors}; exec "$@"'
        command = ["bash", "-c", limits, "-", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    server = Server(process, port)

    def ready() -> bool:
        assert process.poll() is None, "it ended"
        with contextlib.suppress(httpx.TransportError):
            return server.status("/ready") == 200
        return False

    try:
        until(ready, "it is ready")
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):  # both have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
