"""A `quire serve` of the demo model, and one whose chat template has tools."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from quire.service.demo import MODEL_FOLDER
from tests.docs.pages import ROOT, SECONDS
from tests.service import tool_templates


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
def port() -> Iterator[str]:
    with serving() as number:
        yield number


@pytest.fixture(scope="session")
def tools_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo model with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("model") / "with-tools"
    shutil.copytree(MODEL_FOLDER, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"chat_template": tool_templates.HERMES}), encoding="utf-8")
    with serving(str(folder)) as number:
        yield number
