"""docs/first-hour.md and its notebook: everything in them runs as it stands, in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.pages import PAGES, PORT, ROOT, SECONDS, block, blocks
from tests.waiting import until

PAGE = PAGES["docs/first-hour.md"]
SERVE = "quire serve --config serve.yaml"


def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    (tmp_path / "serve.yaml").write_text(block("yaml", "port:", PAGE).replace(PORT, port))
    (tmp_path / "quire").write_text(f'#!/bin/sh\nexec {sys.executable} -m quire "$@"\n')
    (tmp_path / "quire").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "QUIRE_SWAP_SPACE": "0",
        "QUIRE_NUM_GPU_BLOCKS_OVERRIDE": "256",
    }

    def run(commands: str) -> str:
        done = subprocess.run(
            ["bash", "-uo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=3 * SECONDS,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.stdout

    look, talk, serve, ask = blocks("sh", PAGE)
    assert "verdict    it runs here. Type: quire serve" in run(look)
    assert "KV" in run(talk)
    assert serve.strip() == SERVE
    with subprocess.Popen(
        SERVE.split(), cwd=tmp_path, env=environment, executable=tmp_path / "quire"
    ) as server:
        try:
            url = f"http://127.0.0.1:{port}"

            def ready() -> bool:
                assert server.poll() is None
                try:
                    return httpx.get(f"{url}/ready").status_code == 200
                except httpx.TransportError:
                    return False

            until(ready, "the server is ready")
            told = run(ask.replace(PORT, port))
            assert '"version"' in told and "chat.completion" in told
            assert '"model":"demo"' in told  # which the file names
            server.send_signal(signal.SIGINT)
            assert server.wait(SECONDS) == 0
        finally:
            server.kill()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs_from_its_first_cell_to_its_last(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "docs/first-hour.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]  # which would go out of date
            exec("".join(cell["source"]), names)
    shown = capsys.readouterr().out
    assert "A block is" in shown and "KV" in shown
    assert names["output"]._repr_html_()
