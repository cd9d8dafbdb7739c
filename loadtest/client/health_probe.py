"""Asks a server for /health at a steady rate, as a supervisor does, and notes how long each answer took."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
TIMEOUT = 30.0


@dataclass(frozen=True)
class Asked:
    """Begin, by `time.monotonic`, and what it took, in seconds; `status` 0: no answer came."""

    begin: float
    seconds: float
    status: int
    waited: float = 0.0  # seconds of it for which the server's event loop waited for a core


def waited_seconds(pid: int) -> float:
    """Return how long its main thread, which has the event loop, has waited for a core to run on."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


def probe(port: int, seconds: float, every: float, pid: int | None = None) -> list[Asked]:
    """Ask for so many seconds; return all that was asked, with the waits of process `pid` if one is given."""
    found: list[Asked] = []
    until = time.monotonic() + seconds
    connection: socket.socket | None = None
    while (begin := time.monotonic()) < until:
        status, waited = 0, 0.0
        try:
            before = 0.0 if pid is None else waited_seconds(pid)
            connection = connection or socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
            connection.sendall(REQUEST)
            status = _status(connection)
            waited = 0.0 if pid is None else waited_seconds(pid) - before
        except OSError:
            pass
        found.append(Asked(begin, time.monotonic() - begin, status, waited))
        if status == 0 and connection is not None:
            connection.close()
            connection = None
        time.sleep(every)
    if connection is not None:
        connection.close()
    return found


def probe_all(servers: Sequence[tuple[int, int | None]], seconds: float, every: float) -> list[list[Asked]]:
    """Ask several servers, by port and process, beside each other.

    For a process of its own, whose threads sleep nearly always.
    """
    found: list[list[Asked]] = [[] for _ in servers]

    def work(at: int) -> None:
        port, pid = servers[at]
        found[at] = probe(port, seconds, every, pid)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(servers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _status(connection: socket.socket) -> int:
    answer = b""
    while b"}" not in answer:
        part = connection.recv(4096)
        if not part:
            return 0
        answer += part
    return int(answer.split(b" ", 2)[1])
