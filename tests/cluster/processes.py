"""`quire serve` and `quire route` as an operator starts them, on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from quire.loadtest.servers.server_process import free_port
from quire.service.demo import MODEL_FOLDER
from tests.waiting import SECONDS, until

ROOT = Path(__file__).parents[2]


def make_model(folder: Path) -> Path:
    """The demo model's tokenizer with a much smaller body, whose weights are drawn at start."""
    shutil.copytree(MODEL_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Process:
    """A `quire` command that answers at `url`."""

    def __init__(self, command: str, *arguments: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "quire.cli", command, *arguments, "--port", str(self.port)]
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def ready(self) -> bool:
        assert self._process.poll() is None, "it ended"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready").status_code == 200
        return False

    def wait_ready(self) -> None:
        until(lambda: self.ready, f"{self.url} is ready")

    def terminate(self) -> int:
        """In order. Returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(SECONDS)

    def kill(self) -> None:
        """As a machine goes, with all that runs on it: nothing is told to anybody."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
