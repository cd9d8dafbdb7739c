"""Open WebUI as a program of its own, started as docs/clients.md says, and signed in to as a person does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from msgspec import json

from quire.loadtest.servers.server_process import free_port
from tests.docs.pages import PAGES, PORT, block, section
from tests.waiting import until

START_SECONDS = 240  # it imports much, and makes its database
TOLD = block("sh", "open-webui serve", section(PAGES["docs/clients.md"], "Open WebUI"))
# nobody's machine is left for a test, and nothing is kept
ALONE = {
    "WEBUI_AUTH": "False",
    "OFFLINE_MODE": "True",
    "ENABLE_VERSION_UPDATE_CHECK": "False",
    "WEBUI_SECRET_KEY": "secret",
    "GLOBAL_LOG_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class OpenWebUI:
    url: str
    client: httpx.Client

    def get(self, path: str) -> Any:
        return self._read(self.client.get(path))

    def post(self, path: str, **body: Any) -> Any:
        return self._read(self.client.post(path, json=body))

    def upload(self, path: str, name: str, text: str) -> Any:
        return self._read(self.client.post(path, files={"file": (name, text, "text/plain")}))

    def streamed(self, path: str, **body: Any) -> str:
        """Return the text of the deltas."""
        said = ""
        with self.client.stream("POST", path, json={**body, "stream": True}) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                for choice in json.decode(line.removeprefix("data: ")).get("choices", ()):
                    said += choice["delta"].get("content") or ""
        return said

    def _read(self, reply: httpx.Response) -> Any:
        assert reply.is_success, reply.text
        return reply.json()


@contextmanager
def serving(packages: Path, quire: str, home: Path, **settings: str) -> Iterator[OpenWebUI]:
    """Serve from `packages` to a Quire at the URL `quire`, with what it keeps in `home`."""
    told = dict(re.findall(r"^export (\w+)=(\S+)", TOLD, re.MULTILINE))
    told = {name: value.replace(f"http://127.0.0.1:{PORT}", quire) for name, value in told.items()}
    port = free_port()
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(packages), "DATA_DIR": str(home)}
    environment |= told | ALONE | settings
    command = [
        sys.executable,
        str(packages / "bin/open-webui"),
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    url = f"http://127.0.0.1:{port}"
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def healthy() -> bool:
        assert process.poll() is None, (home / "log").read_text()
        try:
            return httpx.get(f"{url}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    try:
        until(healthy, "Open WebUI answers", START_SECONDS)
        with httpx.Client(base_url=url, timeout=60) as client:
            page = OpenWebUI(url, client)
            token = page.post("/api/v1/auths/signin", email="", password="")["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield page
    finally:
        process.terminate()
        process.wait(30)
