"""More than fits is refused by stated limits, and what was there goes on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.service.admission import QueueLimits
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.http.descriptors import RESERVED, most_connections
from tests.service.asgi import Exchange, exchange, get, post
from tests.service.conftest import Service
from tests.service.live import Live

PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


def line(**limits: int) -> tuple[QueueLimits, list[float]]:
    """With a clock that the test sets."""
    now = [100.0]
    return QueueLimits(ServiceConfig(served_model_names=("m",), **limits), lambda: now[0]), now


@given(st.integers(2, 200), st.floats(0.01, 5.0), st.integers(1, 500))
def test_retry_after_is_when_half_of_the_line_will_have_started(
    starts: int, seconds: float, waiting: int
) -> None:
    waiters, now = line(max_num_queued_reqs=waiting)
    for _ in range(waiting):
        waiters.enter(1)
    for _ in range(starts):
        now[0] += seconds
        waiters.enter(1)
        waiters.start(1)
    with pytest.raises(ApiError) as full:
        waiters.check(1)
    expected = min(60, max(1, math.ceil(waiting / 2 * seconds)))
    assert full.value.status == 429
    assert abs((full.value.retry_after or 0) - expected) <= 1  # of floats that round apart


@given(st.lists(st.integers(1, 30), max_size=30))
def test_tokens_that_wait_are_bounded_but_one_request_always_may(prompts: list[int]) -> None:
    waiters, _ = line(max_num_queued_tokens=20)
    let_in: list[int] = []
    for tokens in prompts:
        try:
            waiters.check(1, tokens)
        except ApiError as error:
            assert sum(let_in) + tokens > 20
            assert f"{tokens} more" in error.message
        else:
            waiters.enter(tokens)
            let_in.append(tokens)
        assert waiters.tokens <= max(20, let_in[0])
    for tokens in let_in:
        waiters.leave(tokens)
    assert (waiters.prompts, waiters.tokens) == (0, 0)


def test_what_is_being_tokenised_counts() -> None:
    waiters, _ = line(max_num_queued_reqs=2, max_untokenised_bytes=100)
    with waiters.tokenising(300), pytest.raises(ApiError, match="300 bytes wait"), waiters.tokenising(1):
        pass
    with waiters.tokenising(60), waiters.tokenising(40), pytest.raises(ApiError, match="2 prompts wait"):
        waiters.check(1)
    waiters.check(2)


@pytest.mark.anyio
async def test_queue_that_is_full_of_tokens(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False, max_num_queued_tokens=40)
    first = exchange(service.app, PATH, {"prompt": "a " * 50, "max_tokens": 1})
    await service.engine.until_added(1)
    refused = await post(service.app, PATH, {"prompt": "b", "max_tokens": 1})
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    service.engine.step()
    assert (await first.finish()).status == 200
    second = exchange(service.app, PATH, {"prompt": "b", "max_tokens": 1})
    await service.engine.until_added(2)
    service.engine.step()
    assert (await second.finish()).status == 200
    assert service.state.queue.tokens == 0


@pytest.mark.anyio
async def test_bodies_that_come_at_once_are_bounded_together(make_service: Callable[..., Service]) -> None:
    service = make_service(max_receiving_bytes=1000)
    body = b'{"prompt": "a", "max_tokens": 1}'
    slow = Exchange(service.app, "POST", PATH, b" " * 900, JSON, whole=False).start()
    await asyncio.sleep(0)
    halves = [body.ljust(150), b" "]
    refused = await Exchange(service.app, "POST", PATH, halves, JSON).start().finish()
    assert (refused.status, refused.error["code"]) == (429, "receiving_full")
    assert refused.headers["retry-after"] == "1"
    assert (await get(service.app, "/health")).status == 200
    slow.leave()
    assert slow.task is not None
    await slow.task
    for _ in range(8):  # what is whole no longer counts
        assert (await Exchange(service.app, "POST", PATH, halves, JSON).start().finish()).status == 200


def test_connections_are_capped(make_live: Callable[..., Live]) -> None:
    live = make_live(max_connections=4)
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def connect() -> socket.socket:
        return stack.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=20))

    def is_served(connection: socket.socket) -> bool:
        connection.sendall(ask)
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):  # which may come by itself
            part = connection.recv(4096)
            assert part, f"no whole answer: {answer!r}"
            answer += part
        return answer.startswith(b"HTTP/1.1 200 OK")

    with contextlib.ExitStack() as stack:
        held = [connect() for _ in range(4)]
        for connection in held:
            assert is_served(connection)
        for _ in range(20):
            answer = b""
            with connect() as extra:
                while part := extra.recv(4096):
                    answer += part
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in answer
            assert b"as many connections as it can hold" in answer
        assert is_served(held[0])
        held[0].close()
        live.wait(lambda: len(live.server.server_state.connections) == 3)
        assert is_served(connect())


@given(st.integers(1, 10_000), st.integers(0, 1 << 20))
def test_descriptors_are_kept_in_reserve(wanted: int, limit: int) -> None:
    most = most_connections(wanted, limit)
    assert 1 <= most <= wanted
    assert most == 1 or 2 * most + RESERVED <= limit
    assert most_connections(wanted, resource.RLIM_INFINITY) == wanted
