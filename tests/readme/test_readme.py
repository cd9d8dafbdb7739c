"""What the README tells people to type does what it says, against `quire serve` with the bundled model."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PORT = "8000"  # the one that the README names
SECONDS = 60


def block(language: str, word: str) -> str:
    """The one code block in this language that holds `word`."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if word in text]
    return str(found)


def run(command: list[str], **environment: str) -> str:
    """What it prints; it must succeed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    """Where `quire serve` answers, ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "service.cli", "serve", "--port", number, "--swap-space", "0"]
    blocks = ["--num-gpu-blocks-override", "256"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *blocks], cwd=ROOT, env=environment) as server:
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


def test_curl_streams_a_chat(port: str) -> None:
    command = block("sh", "/v1/chat/completions")
    assert command.count(PORT) == 1
    events = run(["bash", "-ec", command.replace(PORT, port)]).strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "KV cache" in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"


def test_openai_client_streams_a_chat(port: str) -> None:
    program = block("python", "chat.completions")
    assert program.count(PORT) == 1
    assert "block" in run([sys.executable, "-c", program.replace(PORT, port)])


def test_curl_streams_a_response(port: str) -> None:
    command = block("sh", "/v1/responses")
    assert command.count(PORT) == 1
    events = run(["bash", "-ec", command.replace(PORT, port)]).strip().split("\n\n")
    parts = [json.loads(event.split("data: ", 1)[1]) for event in events]
    assert parts[-1]["type"] == "response.completed"
    deltas = [part["delta"] for part in parts if part["type"] == "response.output_text.delta"]
    assert "KV cache" in "".join(deltas)


def test_openai_client_streams_a_response(port: str) -> None:
    program = block("python", "responses.stream")
    assert program.count(PORT) == 1
    assert "block" in run([sys.executable, "-c", program.replace(PORT, port)])


def test_browser_gets_the_page_that_is_pictured(port: str) -> None:
    assert f"http://127.0.0.1:{PORT}/" in README
    page = httpx.get(f"http://127.0.0.1:{port}/")
    assert page.status_code == 200
    assert "<title>Quire</title>" in page.text


def test_offline_use_takes_three_lines() -> None:
    program = block("python", "LLM(")
    assert len([line for line in program.splitlines() if line]) == 3
    assert len(run([sys.executable, "-c", program]).split()) > 5


def test_files_that_are_named_exist() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert "service/chat.png" in targets
    for path in targets:
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:engine|kernels|service|loadtest|tests)/[\w./]*)`", README):
        assert (ROOT / path).exists(), path


def test_flags_that_are_named_exist() -> None:
    commands = [["service.cli", name] for name in ("serve", "generate", "bench", "route")]
    commands += [["loadtest", name] for name in ("run", "sweep", "compare", "record", "figures", "simulate")]
    known = "".join(run([sys.executable, "-m", *command, "--help"]) for command in commands)
    for flag in set(re.findall(r"`(--[a-z-]+)", README)):
        assert re.search(rf"{flag}\b(?!-)", known), flag
