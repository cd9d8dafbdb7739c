"""A server that is measured, as a process of its own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START_SECONDS = 60
# Linux gives none of these to outgoing connections, one of which could take a port before its server does.
PORTS = range(20_000, 32_000)
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all the process's threads, not of children, in ticks of mostly 10 ms (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_SECONDS


def free_port() -> int:
    """Return one that nobody listens on."""
    while True:
        port = secrets.choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def running(module: str, *arguments: str, port: int) -> Iterator[int]:
    """Yield the process id of a server that answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, env=environment) as process:
        try:
            wait_until_ready(port, process)
            yield process.pid
        finally:
            process.terminate()


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as probe:
                probe.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                if probe.recv(64).split(b" ")[1:2] in ([b"200"], [b"404"]):  # the plain loop has no /ready
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the server did not become ready")
