"""Sockets that misbehave in every way we know, while sixteen streams go on as if nothing were."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from quire.loadtest.chaos.attacks import ATTACKS, Attacker, answer, reset
from quire.service.text.tokenizer import Tokenizer
from tests.service.live import Live

STREAMS = 16
TOKENS = 120
HEADER_LIMIT = 16 << 10
BODY_LIMIT = 1 << 20


@contextlib.contextmanager
def streams(live: Live) -> Iterator[list[socket.socket]]:
    """Each has had its first token."""
    attacker = Attacker(live.port, HEADER_LIMIT, BODY_LIMIT)
    with attacker.sockets:
        running = []
        for at in range(STREAMS):
            body = {"prompt": f"{at:02}", "max_tokens": TOKENS, "stream": True}
            running.append(attacker.ask(json.dumps(body).encode(), b"Connection: close\r\n"))
        live.wait(lambda: len(live.engine.streams) == STREAMS)
        live.call(live.engine.step)
        yield running


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Live]:
    live = Live(
        tokenizer, auto=False, receive_timeout=0.5, max_header_bytes=HEADER_LIMIT, max_body_bytes=BODY_LIMIT
    )
    yield live
    assert live.end() == 0


def test_streams_go_on_unharmed(guarded: Live, tokenizer: Tokenizer) -> None:
    live = guarded
    attacker = Attacker(live.port, HEADER_LIMIT, BODY_LIMIT)
    with streams(live) as running, attacker.sockets:
        steps = 1
        for attack in ATTACKS:
            attack(attacker)
            assert httpx.get(f"{live.url}/health", timeout=30).status_code == 200, attack
            assert len(live.engine.active) == STREAMS, attack
            for _ in range(TOKENS // len(ATTACKS)):
                live.call(live.engine.step)
                steps += 1
        for _ in range(TOKENS - steps):
            live.call(live.engine.step)
        for at, connection in enumerate(running):
            data = answer(connection)
            assert data.startswith(b"HTTP/1.1 200 OK")
            events = [part.split(b"\n\n")[0] for part in data.split(b"data: ")[1:]]
            assert events.pop() == b"[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events]
            tokens = tokenizer.encode(f"{at:02}", add_special_tokens=True)
            expected = tokenizer.decode((tokens * TOKENS)[:TOKENS], skip_special_tokens=True)
            assert "".join(choice["text"] for choice in choices) == expected
            assert choices[-1]["finish_reason"] == "length"
    live.wait(lambda: not live.server.server_state.connections)
    assert live.server.state.queue.prompts == 0
    assert not live.server.state.generations
    assert len(live.engine.streams) == STREAMS  # no attack got as far as the engine


def test_readers_that_reset_or_half_close_amid_a_stream_are_aborted(make_live: Callable[..., Live]) -> None:
    live = make_live(auto=False)
    with streams(live) as running:
        for connection in running[:4]:
            reset(connection)
        for connection in running[4:8]:
            connection.shutdown(socket.SHUT_WR)
        live.wait(lambda: sum(stream.aborted for stream in live.engine.streams) == 8)
        for _ in range(TOKENS - 1):
            live.call(live.engine.step)
        for connection in running[8:]:
            assert b"data: [DONE]" in answer(connection)
    assert sum(stream.aborted for stream in live.engine.streams) == 8
