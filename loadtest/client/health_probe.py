"""Asks a server for /health at a steady rate, as a supervisor does, and notes how long each answer took."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
TIMEOUT = 30.0


@dataclass(frozen=True)
class Asked:
    """Begin, by `time.monotonic`, and what it took, in seconds; `status` 0: no answer came."""

    begin: float
    seconds: float
    status: int


def probe(port: int, seconds: float, every: float) -> list[Asked]:
    """All that was asked within so many seconds."""
    found: list[Asked] = []
    until = time.monotonic() + seconds
    connection: socket.socket | None = None
    while (begin := time.monotonic()) < until:
        status = 0
        try:
            connection = connection or socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
            connection.sendall(REQUEST)
            status = _status(connection)
        except OSError:
            pass
        found.append(Asked(begin, time.monotonic() - begin, status))
        if status == 0 and connection is not None:
            connection.close()
            connection = None
        time.sleep(every)
    if connection is not None:
        connection.close()
    return found


def probe_all(ports: list[int], seconds: float, every: float) -> list[list[Asked]]:
    """Several servers beside each other; for a process of its own, whose threads sleep nearly always."""
    found: list[list[Asked]] = [[] for _ in ports]

    def work(at: int) -> None:
        found[at] = probe(ports[at], seconds, every)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(ports))]
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
