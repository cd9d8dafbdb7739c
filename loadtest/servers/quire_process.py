"""A `quire` command as a process on loopback, which can be ended in any way and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

START_SECONDS = 120.0
STOP_SECONDS = 10.0


class QuireProcess:
    """On one port for all its lives. `environment`: more variables, such as a key that `ps` must not show."""

    def __init__(self, *arguments: str, port: int, environment: dict[str, str] | None = None) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "quire.cli", *arguments, "--port", str(port)]
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def wait_until_ready(self) -> None:
        """Wait. Raise RuntimeError if it ends, or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.exit_code is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}/ready", timeout=5).close()
                return
            time.sleep(0.1)
        state = "not ready yet" if self.exit_code is None else f"gone (exit code {self.exit_code})"
        raise RuntimeError(f"{self.url} is {state}; start the demo model by hand to see why: quire serve")

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Return the exit code. Raise subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(seconds)

    def stop(self) -> None:
        """Stop it in order, or else by force."""
        if self.exit_code is None:
            self.signal(signal.SIGTERM)
        try:
            self.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.wait(STOP_SECONDS)


@contextlib.contextmanager
def quire(*arguments: str, port: int, environment: dict[str, str] | None = None) -> Iterator[QuireProcess]:
    """Start a process; stop it in the end."""
    process = QuireProcess(*arguments, port=port, environment=environment)
    process.start()
    try:
        yield process
    finally:
        process.stop()
