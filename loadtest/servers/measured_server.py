"""`quire serve` as a process whose own words are seen, for what measures a start or what clients see."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from quire.loadtest.servers.server_process import free_port


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def graphs_left(self) -> int | None:
        """Return how many CUDA graphs are missing; None: it is not ready."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready", timeout=5) as response:
            return int(json.load(response)["graphs_left"])
        return None

    def wait_for(self, moment: Callable[[], bool], until: float, pause: float) -> float:
        """Return when the moment came. Raise RuntimeError if the server ends, or it is too late for that."""
        while not moment():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server does not come up (exit code {self.process.poll()})")
            time.sleep(pause)
        return time.monotonic()


@contextlib.contextmanager
def serving(
    model: str, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[MeasuredServer]:
    """Yield a server that has just been started; end it afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "quire.cli", "serve", model, *flags, "--port", str(port)]
    with subprocess.Popen(command, env={**os.environ, **(environment or {})}) as process:
        try:
            yield MeasuredServer(port, process)
        finally:
            process.terminate()
            process.wait(60)
