"""The client against a server whose every byte is known."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.loadtest.client.answer import Answer
from quire.loadtest.client.counters import read_counters
from quire.loadtest.client.driver import drive
from quire.loadtest.client.http_client import HttpClient
from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session, Turn
from quire.loadtest.client.target import Target, first_model
from tests.loadtest.scripted_server import (
    Asked,
    Reply,
    ScriptedServer,
    chunked,
    events,
    plain,
    scripted_server,
)

TOKENS = ["a", "", "ü", "\u2028b", "data: x"]


def session(turns: int = 1, at: float = 0.0, **fields: int) -> Session:
    return Session(turns=[Turn(prompt="hi", output_len=len(TOKENS), **fields)] * turns, at=at)


def run(
    server: ScriptedServer, sessions: list[Session], concurrency: int | None, **target: object
) -> asyncio.Future:
    settings_ = {"base_url": server.url, "model": "m", "timeout": 30.0, **target}
    return drive(
        Target(**settings_), "", list(enumerate(sessions)), concurrency, time.monotonic(), lambda record: None
    )


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 400), chat=st.booleans(), cached=st.integers(0, 5))
def test_a_stream_is_read_however_it_is_cut(size: int, chat: bool, cached: int) -> None:
    async def test() -> None:
        answer = chunked(events(TOKENS, cached=cached, chat=chat), size)
        async with scripted_server(lambda asked: Reply(answer)) as server:
            (record,) = await run(server, [session()], 1, api="chat" if chat else "completions")
        assert (record.failure, record.detail) == ("", "")
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (5, 5, cached)
        assert len(record.gaps) == len(TOKENS) - 1
        assert record.due <= record.sent <= record.first <= record.last
        assert record.first + sum(record.gaps) <= record.last + 1e-9

    asyncio.run(test())


def test_times_are_those_of_the_bytes() -> None:
    record = Record(session=0, turn=0, due=1.0, sent=1.5)
    answer = Answer(record, start=100.0)
    lines = events(["x", "y", "z"]).split(b"\n\n")
    for number, line in enumerate(lines):
        answer.feed(line + b"\n\n", 103.0 + number)
    # a comment, x, y, z, the end, usage, [DONE]
    assert (record.first, record.last, record.gaps) == (4.0, 7.0, [1.0, 1.0])
    assert (record.ttft, record.latency, record.lag) == (3.0, 6.0, 0.5)  # all from when it was due
    assert record.tpot == 1.5 and record.normalized_latency == 2.0
    assert answer.done and answer.text == ["x", "y", "z", ""]


def test_samples_are_timed_each_by_itself() -> None:
    record = Record(session=0, turn=0, due=0.0, sent=0.0)
    answer = Answer(record, start=0.0)
    for now, index in [(1.0, 0), (2.0, 1), (5.0, 0), (7.0, 1)]:
        event = {"choices": [{"index": index, "text": "t", "finish_reason": None}]}
        answer.feed(f"data: {json.dumps(event)}\n".encode(), now)
    assert record.gaps == [4.0, 5.0] and (record.first, record.last) == (1.0, 7.0)
    assert answer.sequences == 2 and answer.text == ["t", "t"]


def test_token_ids_tell_of_tokens_without_text() -> None:
    """The first and the third have none; text that comes without a token is text, and no token's time."""
    record = Record(session=0, turn=0, due=0.0, sent=0.0)
    answer = Answer(record, start=0.0)
    chunks = [(1.0, "", [5]), (2.0, "b", [6, 7]), (4.0, "", [8]), (9.0, "c", [])]
    for now, text, token_ids in chunks:
        event = {"choices": [{"index": 0, "text": text, "finish_reason": None, "token_ids": token_ids}]}
        answer.feed(f"data: {json.dumps(event)}\n".encode(), now)
    assert (record.first, record.last, record.gaps) == (1.0, 4.0, [1.0, 2.0])
    assert "".join(answer.text) == "bc"


def test_the_last_token_may_come_with_the_end_and_without_text() -> None:
    record = Record(session=0, turn=0, due=0.0, sent=0.0)
    answer = Answer(record, start=0.0)
    for now, token_ids, finish in [(1.0, [5], None), (3.0, [6], "length")]:
        event = {"choices": [{"index": 0, "text": "", "finish_reason": finish, "token_ids": token_ids}]}
        answer.feed(f"data: {json.dumps(event)}\n".encode(), now)
    assert (record.first, record.last, record.gaps) == (1.0, 3.0, [2.0])


FAILURES: dict[str, Reply] = {
    "HTTP 429": Reply(plain("429 Too Many Requests", b'{"error": "full"}')),
    "HTTP 503": Reply(plain("503 Service Unavailable", b"busy")),
    "stream error": Reply(chunked(b'data: {"error": {"message": "boom"}}\n\ndata: [DONE]\n\n', 50)),
    "protocol": Reply(plain("200 OK", b'{"choices": []}')),
    "no tokens": Reply(chunked(b"data: [DONE]\n\n", 50)),
    "wrong length": Reply(chunked(events(["a"]), 50)),
    "disconnected": Reply(chunked(events(TOKENS), 300)[:3], closes=True),
    "connection": Reply([], closes=True),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_told_apart_and_end_a_session(kind: str) -> None:
    async def test() -> None:
        async with scripted_server(lambda asked: FAILURES[kind]) as server:
            (record,) = await run(server, [session(turns=3)], 1, api="chat")
        assert record.failure == kind and (record.detail or kind == "no tokens")

    asyncio.run(test())


def test_nobody_answers() -> None:
    async def test() -> None:
        async with scripted_server(lambda asked: Reply([])) as server:
            pass  # the port is free again
        (record,) = await run(server, [session()], 1)
        assert record.failure == "connection"

    asyncio.run(test())


def test_an_answer_that_never_ends_times_out() -> None:
    async def test() -> None:
        async with scripted_server(lambda asked: Reply(chunked(events(TOKENS), 300)[:2])) as server:
            (record,) = await run(server, [session()], 1, timeout=0.2)
        assert record.failure == "timeout"

    asyncio.run(test())


def test_later_turns_carry_the_conversation() -> None:
    async def test() -> None:
        answer = chunked(events(TOKENS, chat=True), 64)
        async with scripted_server(lambda asked: Reply(answer)) as server:
            records = await run(server, [session(turns=3)], 1, api="chat")
        assert [record.turn for record in records] == [0, 1, 2]
        assert all(later.due >= earlier.last for earlier, later in pairwise(records))
        user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "".join(TOKENS)}
        assert [asked.body["messages"] for asked in server.asked] == [
            [user],
            [user, assistant, user],
            [user, assistant, user, assistant, user],
        ]
        assert {asked.connection for asked in server.asked} == {1}, "the connection is not used again"

    asyncio.run(test())


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_its_concurrency(concurrency: int) -> None:
    async def test() -> None:
        answer = chunked(events(TOKENS), 16)
        async with scripted_server(lambda asked: Reply(answer)) as server:
            records = await run(server, [session()] * 12, concurrency)
        assert len(records) == 12 and not any(record.failure for record in records)
        assert max(asked.at_once for asked in server.asked) == concurrency
        assert server.connections == concurrency

    asyncio.run(test())


def test_an_open_loop_waits_for_nobody() -> None:
    """Every request is sent though none is answered before the last one is there."""

    async def test() -> None:
        sessions = [session(at=at) for at in (0.03, 0.0, 0.02, 0.01)]
        everyone = asyncio.Event()

        def reply(asked: Asked) -> Reply:
            if asked.at_once == len(sessions):
                everyone.set()
            return Reply(chunked(events(TOKENS), 64), after=everyone)

        async with scripted_server(reply) as server:
            records = await run(server, sessions, None)
        assert not any(record.failure for record in records)
        assert [record.due for record in records] == [0.03, 0.0, 0.02, 0.01]
        assert all(record.sent >= record.due for record in records)

    asyncio.run(test())


def test_a_kept_connection_that_the_server_closed_is_no_failure() -> None:
    async def test() -> None:
        async with scripted_server(lambda asked: Reply(plain("200 OK", b"x"), closes=True)) as server:
            client = HttpClient(server.url, {}, 30.0)
            for _ in range(3):
                assert await client.get("/") == (200, b"x")
            client.close()
        assert server.connections == 3

    asyncio.run(test())


@pytest.mark.parametrize(
    "pieces", [plain("200 OK", b"<p class='a b'>Hello!</p>"), plain("404 Not Found", b""), [b"SSH-2.0\r\n"]]
)
def test_counters_of_a_server_that_has_none(pieces: list[bytes]) -> None:
    async def test() -> None:
        async with scripted_server(lambda asked: Reply(pieces)) as server:
            assert await read_counters(HttpClient(server.url, {}, 30.0)) == {}

    asyncio.run(test())


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (plain("200 OK", b"<p>Hello!</p>"), "lists no model; give --model"),
        (plain("200 OK", b'{"data": []}'), "lists no model; give --model"),
        (plain("401 Unauthorized", b""), r"answered 401; give --model \(and --api-key-env\)"),
        ([b"SSH-2.0\r\n"], "no HTTP server answers"),
    ],
)
def test_a_server_that_lists_no_model(pieces: list[bytes], said: str) -> None:
    async def test() -> None:
        async with scripted_server(lambda asked: Reply(pieces)) as server:
            with pytest.raises(ValueError, match=said):
                await first_model(Target(base_url=server.url, model=""), "")

    asyncio.run(test())


def test_what_a_request_says() -> None:
    async def test() -> None:
        async with scripted_server(lambda asked: Reply(chunked(events(TOKENS), 64))) as server:
            target = Target(base_url=server.url, model="m", token_ids=True, extra_body={"cache_salt": "s"})
            turns = [Turn(prompt=[1, 2], output_len=5), Turn(prompt=[1], output_len=5, n=1, beam_width=4)]
            numbered = [(i, Session(turns=[turn])) for i, turn in enumerate(turns)]
            await drive(target, "key", numbered, 1, time.monotonic(), lambda record: None)
        first, beams = server.asked
        assert first.headers["authorization"] == "Bearer key" and first.path == "/v1/completions"
        common = {
            "model": "m",
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": "s",
        }
        assert first.body == {**common, "prompt": [1, 2], "temperature": 0.0}
        assert beams.body == {**common, "prompt": [1], "use_beam_search": True, "best_of": 4, "n": 1}

    asyncio.run(test())


def test_what_cannot_be_sent_is_refused_beforehand() -> None:
    with pytest.raises(ValueError, match="--text"):
        Target(base_url="http://h", model="m", api="chat").check(
            Session(turns=[Turn(prompt=[1], output_len=1)])
        )
    with pytest.raises(ValueError, match="http://"):
        HttpClient("localhost:8000", {}, 1.0)
