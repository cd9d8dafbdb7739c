"""Answers over WebSockets are read, timed and judged as those of event streams are."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from quire.loadtest.client.driver import drive
from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session, Turn
from quire.loadtest.client.target import Target
from tests.loadtest.scripted_server import events

TOKENS = ["a", "", "ü", "data: x"]
DONE = json.dumps({"done": True})
FRAMES = [
    *(line.removeprefix("data: ") for line in events(TOKENS).decode().split("\n\n") if "{" in line),
    DONE,
]
Talk = Callable[[ServerConnection], Awaitable[None]]


@dataclass
class SocketServer:
    url: str = ""
    handshakes: list[Request] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)


@asynccontextmanager
async def socket_server(talk: Talk, refusal: HTTPStatus | None = None) -> AsyncIterator[SocketServer]:
    """One that talks as the test says, after it has read a frame; again and again."""
    made = SocketServer()

    def note(connection: ServerConnection, request: Request) -> Response | None:
        made.handshakes.append(request)
        return None if refusal is None else connection.respond(refusal, "no")

    async def serve_one(connection: ServerConnection) -> None:
        async for message in connection:
            made.asked.append(json.loads(message))
            await talk(connection)

    async with serve(serve_one, "127.0.0.1", 0, process_request=note) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


async def answer(connection: ServerConnection) -> None:
    for frame in FRAMES:
        await connection.send(frame)


async def run(server: SocketServer, turns: int = 1, **more: Any) -> list[Record]:
    target = Target(base_url=server.url, model="m", transport="websocket", **{"timeout": 30.0, **more})
    sessions = [(0, Session(turns=[Turn(prompt="hi", output_len=len(TOKENS))] * turns))]
    return await drive(target, "key", sessions, 1, time.monotonic(), lambda record: None)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_answer_is_read_and_its_socket_used_again(api: str) -> None:
    async def test() -> None:
        async with socket_server(answer) as server:
            records = await run(server, turns=2, api=api)
        for record in records:
            assert (record.failure, record.detail) == ("", "")
            assert (record.prompt_tokens, record.output_tokens) == (5, len(TOKENS))
            assert len(record.gaps) == len(TOKENS) - 1
            assert record.due <= record.sent <= record.first <= record.last
        (handshake,) = server.handshakes
        assert handshake.path == ("/v1/completions" if api == "completions" else "/v1/chat/completions")
        assert handshake.headers["authorization"] == "Bearer key"
        assert [asked["max_tokens"] for asked in server.asked] == [len(TOKENS)] * 2

    asyncio.run(test())


async def fail(connection: ServerConnection) -> None:
    await connection.send(json.dumps({"error": {"message": "boom"}}))


async def end_in_the_middle(connection: ServerConnection) -> None:
    await connection.send(FRAMES[0])
    await connection.close()


async def end_at_once(connection: ServerConnection) -> None:
    await connection.close()


async def say_nothing_of_tokens(connection: ServerConnection) -> None:
    await connection.send(DONE)


async def talk_nonsense(connection: ServerConnection) -> None:
    await connection.send("{")


@pytest.mark.parametrize(
    ("kind", "talk"),
    [
        ("stream error", fail),
        ("disconnected", end_in_the_middle),
        ("connection", end_at_once),
        ("no tokens", say_nothing_of_tokens),
        ("protocol", talk_nonsense),
    ],
)
def test_a_failure_has_its_kind(kind: str, talk: Talk) -> None:
    async def test() -> None:
        async with socket_server(talk) as server:
            (record,) = await run(server)
        assert record.failure == kind and record.detail

    asyncio.run(test())


def test_a_refused_handshake_is_a_status() -> None:
    async def test() -> None:
        async with socket_server(answer, HTTPStatus.UNAUTHORIZED) as server:
            (record,) = await run(server)
        assert record.failure == "HTTP 401"

    asyncio.run(test())


def test_an_answer_that_never_ends_times_out() -> None:
    async def test() -> None:
        async def begin(connection: ServerConnection) -> None:
            await connection.send(FRAMES[0])

        async with socket_server(begin) as server:
            (record,) = await run(server, timeout=0.2)
        assert record.failure == "timeout"

    asyncio.run(test())


def test_a_socket_that_the_server_closed_while_it_was_idle_is_no_failure() -> None:
    async def test() -> None:
        async def answer_and_close(connection: ServerConnection) -> None:
            await answer(connection)
            await connection.close()

        async with socket_server(answer_and_close) as server:
            records = await run(server, turns=2)
        assert [record.failure for record in records] == ["", ""]
        assert len(server.handshakes) == 2

    asyncio.run(test())
