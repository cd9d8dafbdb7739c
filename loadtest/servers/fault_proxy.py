"""Stands between a client and Redis, and does to its answers what it is told."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

Fault = Callable[[bytes], bytes | Iterator[bytes]]  # or pieces, each of which is sent as it comes


def honest(data: bytes) -> bytes:
    return data


def slow(data: bytes) -> bytes:
    """Wait longer than anybody waits for it."""
    time.sleep(0.6)
    return data


def dripping(data: bytes) -> Iterator[bytes]:
    """Send a byte at a time, of an answer that is right but for zeros before its first number."""
    for byte in data.replace(b"*", b"*" + 80 * b"0", 1):
        time.sleep(0.01)
        yield bytes([byte])


def gone(data: bytes) -> bytes:
    raise ConnectionResetError


def garbled(data: bytes) -> bytes:
    return bytes(byte ^ 0x15 for byte in data)


def lying(data: bytes) -> bytes:
    """Put other numbers into answers that are well formed."""
    lines = data.split(b"\r\n")
    return b"\r\n".join(b":99999" if line.startswith(b":") else line for line in lines)


def nonsense(data: bytes) -> bytes:
    """Answer what is well formed, and not what was asked for."""
    return b"*2\r\n$3\r\nfoo\r\n$3\r\nbar\r\n"


FAULTS: tuple[Fault, ...] = (slow, dripping, gone, garbled, lying, nonsense)


class FaultProxy:
    def __init__(self, port: int) -> None:
        self.fault: Fault = honest
        self.questions = 0  # pieces of them, since the start
        self._behind = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._behind))
                except ConnectionRefusedError:  # nobody is there just now
                    client.close()
                    continue
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.questions += not answers
                answer = self.fault(data) if answers else data
                for piece in (answer,) if isinstance(answer, bytes) else answer:
                    sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends who waits in `accept`, too
        self._listener.close()
