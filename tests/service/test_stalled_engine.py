"""A real engine process that is stopped in the middle of its work, and goes on later."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.service.processes import Server, serving
from tests.service.test_socket_server import ENDS
from tests.service.test_socket_server import until as events_until
from tests.waiting import SECONDS, until

RUNNING, QUEUED = 4, 3
LONG: dict[str, Any] = {"prompt": "A block is", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT: dict[str, Any] = {**LONG, "max_tokens": 8}
STREAM_ID = "X-Stream-Id: kept\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--stall-timeout", "3", "--max-num-seqs", str(RUNNING), "--swap-space", "0"]
    with serving("quire.cli", "serve", *flags) as server:
        yield server


def socket_url(server: Server) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/responses"


def metric(server: Server, sample: str) -> float:
    found = re.search(f"^{re.escape(sample)} (.*)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    assert found is not None, sample
    return float(found.group(1))


def begin(server: Server, headers: str = "", **fields: Any) -> http.client.HTTPResponse:
    connection = server.post("/v1/completions", json.dumps(LONG | fields).encode(), headers)
    return http.client.HTTPResponse(connection, method="POST")


def started(server: Server, headers: str = "") -> http.client.HTTPResponse:
    """A stream that has had its first token."""
    stream = begin(server, headers, stream=True)
    stream.begin()
    assert stream.status == 200 and stream.peek(1)
    return stream


def ended(text: bytes) -> dict[str, Any]:
    """The error of a stream whose last event it is, and the only one that ends it."""
    events = re.findall(rb"^data: (.*)$", text, re.MULTILINE)
    assert [event == b"[DONE]" or event.startswith(b'{"error"') for event in events].count(True) == 1
    error: dict[str, Any] = json.loads(events[-1])["error"]
    return error


def refused(response: http.client.HTTPResponse) -> dict[str, Any]:
    """The error that a request got instead of its answer."""
    response.begin()
    assert response.status == 503 and int(response.headers["retry-after"]) > 0
    error: dict[str, Any] = json.load(response)["error"]
    return error


def test_what_it_worked_on_ends_and_it_serves_again(server: Server) -> None:
    url = f"{server.url}/v1/completions"
    before = httpx.post(url, json=SHORT, timeout=SECONDS).json()["choices"]
    with connect(socket_url(server)) as client:
        streams = [started(server), started(server, STREAM_ID)]
        endless = {"input": "hello", "max_output_tokens": 1500, "ignore_eos": True}
        client.send(json.dumps({"type": "response.create", **endless}))
        events_until(client, "response.created")
        whole = [begin(server)]
        until(lambda: metric(server, 'quire_requests{state="running"}') == RUNNING, "they run")
        whole += [begin(server, stream=at % 2 == 0) for at in range(QUEUED)]
        until(lambda: metric(server, 'quire_requests{state="waiting"}') == QUEUED, "the rest waits")
        os.kill(server.engine, signal.SIGSTOP)

        errors = [ended(stream.read()) for stream in streams] + [refused(response) for response in whole]
        failed = events_until(client, *ENDS)[-1]
        assert failed["type"] == "response.failed"
        assert {error["code"] for error in errors} == {"engine_stalled"}
        for message in [failed["response"]["error"]["message"], *(error["message"] for error in errors)]:
            assert "no step" in message and "--stall-timeout" in message
        kept = httpx.get(f"{server.url}/v1/streams/kept")
        assert ended(kept.content)["code"] == "engine_stalled"

        assert server.status("/health") == server.status("/ready") == 503
        for path, body in (
            ("/v1/completions", LONG),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
            ("/v1/responses", {"input": "a"}),
        ):
            reply = httpx.post(server.url + path, json=body, timeout=SECONDS)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_stalled")
            assert int(reply.headers["retry-after"]) > 0
        client.send(json.dumps({"type": "response.create", "input": "hello"}))
        assert events_until(client, "error")[-1]["error"]["code"] == "engine_stalled"
        with pytest.raises(InvalidStatus) as handshake:
            connect(socket_url(server))
        assert handshake.value.response.status_code == 503

        os.kill(server.engine, signal.SIGCONT)
        for path in ("/health", "/ready"):
            server.wait(path, 200)
        until(
            lambda: metric(server, 'quire_kv_blocks{state="active",tier="device"}') == 0, "no block is held"
        )
        for state in ("running", "waiting", "swapped"):
            assert metric(server, f'quire_requests{{state="{state}"}}') == 0
        assert httpx.post(url, json=SHORT, timeout=SECONDS).json()["choices"] == before
        client.send(json.dumps({"type": "response.create", "input": "hello", "max_output_tokens": 2}))
        assert events_until(client, *ENDS)[-1]["type"] in ("response.incomplete", "response.completed")


def test_openai_client(server: Server) -> None:
    """It raises what a stream's last event says, and tries again by itself what was refused."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20) as client:
        request: dict[str, Any] = {"model": "quire-demo", "prompt": "A block is"}
        stream = client.completions.create(**request, max_tokens=1500, stream=True)
        next(stream)
        engine = server.engine
        os.kill(engine, signal.SIGSTOP)
        with pytest.raises(openai.APIError) as failure:
            list(stream)
        assert failure.value.code == "engine_stalled"
        timer = threading.Timer(0.5, os.kill, (engine, signal.SIGCONT))
        timer.start()
        assert client.completions.create(**request, max_tokens=4).choices[0].text
        timer.join()
