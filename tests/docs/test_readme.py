"""What README.md tells people to type does what it says, on a `quire serve` of the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.docs.pages import PORT, README, ROOT, SECONDS, block, run, section


def test_a_new_user_can_read_it() -> None:
    assert len(README.splitlines()) <= 200
    needed, cloned, *_ = block("sh", "make serve", section(README, "Quick start")).splitlines()
    assert "apt-get install git make python3" in needed and "git clone" in cloned


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "There is no {python}: apt-get install python3, or set PYTHON=..."),
        ("Python 3.9.2", "Quire needs Python 3.11 or later; {python} is Python 3.9.2. Set PYTHON=..."),
    ],
)
def test_make_says_which_python_it_needs(version: str | None, said: str, tmp_path: Path) -> None:
    python = tmp_path / "some-python"
    if version is not None:
        python.write_text(f'#!/bin/sh\n[ "$1" = -V ] && echo {version}\n')
        python.chmod(0o755)
    done = subprocess.run(
        ["make", "setup", f"PYTHON={python}", f"VENV={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert said.format(python=python) in done.stdout.splitlines()


def test_curl_streams_a_chat(port: str) -> None:
    command = block("sh", "/v1/chat/completions", README)
    assert command.count(PORT) == 1
    events = run(["bash", "-ec", command.replace(PORT, port)]).strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "KV cache" in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"


def test_openai_client_streams_a_chat(port: str) -> None:
    program = block("python", "chat.completions", README)
    assert program.count(PORT) == 1
    assert "block" in run([sys.executable, "-c", program.replace(PORT, port)])


def test_browser_gets_the_page_that_is_pictured(port: str) -> None:
    assert f"http://127.0.0.1:{PORT}/" in README
    page = httpx.get(f"http://127.0.0.1:{port}/")
    assert page.status_code == 200
    assert "<title>Quire</title>" in page.text


def test_offline_use_takes_three_lines() -> None:
    program = block("python", "LLM(", README)
    assert len([line for line in program.splitlines() if line]) == 3
    assert len(run([sys.executable, "-c", program]).split()) > 5


def test_a_websocket_client_streams_a_text(port: str) -> None:
    program = block("python", "websockets", README)
    assert len(run([sys.executable, "-c", program.replace(PORT, port)]).split()) > 5
