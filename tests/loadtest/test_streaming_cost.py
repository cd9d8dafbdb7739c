"""The measurements of the API process count right; how fast anything is, no test says."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.config import EngineConfig
from quire.loadtest.servers.token_source import engine_info
from quire.loadtest.streaming_cost import SSE, WEBSOCKET, Reader, Wire
from quire.service.demo import MODEL_FOLDER

ROOT = Path(__file__).parents[2]
EVENT = b'data: {"text":"data: x {"}\n\n'
FRAME = b'\x81\x24{"object":"text","text":"{\\"object\\":"}'
STREAMS = {
    SSE: b"HTTP/1.1 200 OK\r\n\r\n" + EVENT * 5 + b"data: [DONE]\n\n",
    WEBSOCKET: b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + FRAME * 5 + b'\x81\x0d{"done":true}',
}


@given(st.sampled_from([*STREAMS]), st.lists(st.floats(0, 1), max_size=30))
def test_events_do_not_depend_on_where_the_bytes_are_cut(wire: Wire, cuts: list[float]) -> None:
    stream = STREAMS[wire]

    async def count() -> int:
        reader = Reader(wire)
        edges = [0, *sorted(int(cut * len(stream)) for cut in cuts), len(stream)]
        for begin, end in pairwise(edges):
            reader.data_received(stream[begin:end])
        await reader.done
        return reader.events

    assert asyncio.run(count()) == 5


def run(module: str, *arguments: str) -> dict[str, list[dict[str, float]]]:
    file = Path(arguments[-1])
    subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=200,
    )
    result: dict[str, list[dict[str, float]]] = json.loads(file.read_text())
    return result


def test_every_server_streams_all_its_tokens(tmp_path: Path) -> None:
    rows = run(
        "quire.loadtest.streaming_cost",
        "--streams",
        "4",
        "--tokens",
        "50",
        "--json",
        str(tmp_path / "cost.json"),
    )["servers"]
    quire, over_socket, paced, paced_over_socket, *plain = rows
    for row in rows:
        assert row["tokens"] == 200
        assert 4 <= row["events"] <= 200
    assert quire["events"] <= paced["events"] and over_socket["events"] <= paced_over_socket["events"]
    assert [row["events"] for row in plain] == [200, 200]


def test_each_response_is_measured(tmp_path: Path) -> None:
    few = ("--streams", "4", "--tokens", "50", "--waiting", "4", "--rounds", "1")
    rows = run("quire.loadtest.stream_transports", *few, "--json", str(tmp_path / "cost.json"))["responses"]
    assert [row["response"] for row in rows] == ["starlette", "sse-starlette", "connection"]
    assert all(row["cpu_us_per_token"] > 0 and row["leave_ms"] > 0 for row in rows)


def test_every_request_of_an_overload_is_answered_or_refused(tmp_path: Path) -> None:
    phases = run("quire.loadtest.overload", "--seconds", "0.5", "--json", str(tmp_path / "load.json"))[
        "phases"
    ]
    assert [phase["multiple"] for phase in phases] == [0.5, 1, 2, 10]
    assert all(phase["failed"] == 0 for phase in phases)
    assert phases[0]["refused"] == 0


def test_any_text_can_be_a_prompt_where_there_is_no_model() -> None:
    config = json.loads((Path(MODEL_FOLDER) / "config.json").read_text())
    assert engine_info(EngineConfig(model=MODEL_FOLDER), 1).vocab_size == config["vocab_size"]
