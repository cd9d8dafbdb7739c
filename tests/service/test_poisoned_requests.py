"""Requests that make steps raise, on a real server: they fail alone, unless the device is lost with them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.poisoned import FATAL, POISON

ROOT = Path(__file__).parents[2]
SECONDS = 60
TOPICS = ["A block", "The cache", "A step", "Paging", "Swapping", "A row", "The queue", "Prefill"]
STREAMS = [
    {"prompt": f"{topic} is", "max_tokens": 40, "ignore_eos": True, "temperature": temperature, "seed": 7}
    for topic in TOPICS
    for temperature in (0, 1)
]


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.service.poisoned", port]
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=errors
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + SECONDS
            while process.poll() is None and time.monotonic() < until:
                try:
                    if httpx.get(f"{url}/ready", timeout=SECONDS).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            yield Server(process, url, log)
        finally:
            process.kill()


@dataclass
class Stream:
    """What came of a streamed completion."""

    status: int
    text: str
    ends: list[str]  # "[DONE]", and messages of errors

    @classmethod
    async def of(cls, client: httpx.AsyncClient, body: dict[str, Any]) -> Stream:
        stream = cls(0, "", [])
        request = {"stream": True, **body}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            stream.status = response.status_code
            if response.status_code != 200:
                stream.ends = [json.loads(await response.aread())["error"]["message"]]
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    stream.ends.append("[DONE]")
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        stream.ends.append(event["error"]["message"])
                    else:
                        stream.text += "".join(choice["text"] for choice in event["choices"])
        return stream


async def streams(url: str, bodies: list[dict[str, Any]]) -> list[Stream]:
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        return list(await asyncio.gather(*(Stream.of(client, body) for body in bodies)))


def test_sixteen_streams_go_on_unharmed_beside_poisoned_ones(server: Server) -> None:
    """Some fail before their first token, which is a status, some in their answer, which is an event."""
    alone = asyncio.run(streams(server.url, STREAMS))
    assert {(stream.status, *stream.ends) for stream in alone} == {(200, "[DONE]")}
    poisoned = [
        {"prompt": "A poison is", "max_tokens": 60, "ignore_eos": True, "seed": POISON + at, "n": n}
        for at, n in [(0, 1), (3, 2), (20, 1), (30, 2), (45, 1)]
    ]
    beside = asyncio.run(streams(server.url, [*STREAMS, *poisoned]))
    assert beside[: len(STREAMS)] == alone
    assert [stream.status for stream in beside[len(STREAMS) :]] == [500, 500, 200, 200, 200]
    for stream in beside[len(STREAMS) :]:
        assert stream.ends == ["the engine failed on this request: computing it raised RuntimeError"]
        assert (stream.text != "") == (stream.status == 200)
    assert httpx.get(f"{server.url}/health", timeout=SECONDS).status_code == 200
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    told = [line for line in lines if line["logger"] == "quire.isolation" and line["level"] == "error"]
    assert len(told) == len({line["request"] for line in told}) == len(poisoned)
    assert {line["error"] for line in told} == {"RuntimeError"}
    failed = [number for line in lines for number in line.get("engine_requests", [])]
    assert sorted(failed) == sorted(line["request"] for line in told)

    fatal = {**STREAMS[0], "seed": FATAL, "temperature": 1}
    for stream in asyncio.run(streams(server.url, [*STREAMS, fatal])):
        assert len(stream.ends) == 1 and "the device is lost" in stream.ends[0]
    assert server.process.wait(SECONDS) == 1
