"""`quire serve` as a process of its own, for tests that are its clients."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

SECONDS = 60


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The URL of a server with the bundled model and these flags, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "quire.cli", "serve", "--port", port, *flags]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        try:
            until = time.monotonic() + SECONDS
            while True:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=SECONDS).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert server.poll() is None and time.monotonic() < until
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            assert server.wait(SECONDS) == 0
