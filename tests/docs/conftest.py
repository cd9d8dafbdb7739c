"""A `quire serve` of the demo model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.docs.pages import ROOT, SECONDS


@contextmanager
def serving(*model: str) -> Iterator[str]:
    """Yield the port where `quire serve` answers, ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "quire.cli", "serve", *model, "--port", number]
    memory = ["--swap-space", "0", "--num-gpu-blocks-override", "256"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *memory], cwd=ROOT, env=environment) as server:
        try:
            with httpx.Client(
                transport=httpx.HTTPTransport(retries=8), base_url=f"http://127.0.0.1:{number}"
            ) as client:
                with client.stream("GET", "/startup", timeout=SECONDS) as phases:
                    for _ in phases.iter_lines():  # ends with the phase "ready"
                        pass
                assert client.get("/ready").status_code == 200
            yield number
        finally:
            server.terminate()
            assert server.wait(SECONDS) == 0


@pytest.fixture(scope="session")
def pooling_port() -> Iterator[str]:
    with serving("--runner", "pooling") as number:
        yield number


@pytest.fixture(scope="session")
def port() -> Iterator[str]:
    with serving() as number:
        yield number
