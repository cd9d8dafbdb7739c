"""WS /v1/responses on a real port: real clients, and sockets that misbehave while other streams go on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from quire.service.http.websocket_protocol import OrderlyWebSocketProtocol
from quire.service.text.tokenizer import Tokenizer
from tests.service.live import Live
from tests.service.test_responses import said
from tests.service.test_server import closed, received

KEY = {"Authorization": "Bearer key"}
ENDS = {f"response.{status}" for status in ("completed", "incomplete", "failed", "cancelled")}
SECONDS = 30.0


def opened(live: Live, path: str = "/v1/responses", **options: Any) -> ClientConnection:
    options.setdefault("additional_headers", KEY)
    return connect(f"ws://127.0.0.1:{live.port}{path}", open_timeout=SECONDS, **options)


def create(client: ClientConnection, text: str = "hello", **fields: Any) -> None:
    client.send(json.dumps({"type": "response.create", "input": text, **fields}))


def until(client: ClientConnection, *kinds: str) -> list[dict[str, Any]]:
    """All events up to one of these types."""
    events = [json.loads(client.recv(SECONDS))]
    while events[-1]["type"] not in kinds:
        events.append(json.loads(client.recv(SECONDS)))
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in events)


def ending(client: ClientConnection) -> int | None:
    """The code with which the server closed."""
    with pytest.raises(ConnectionClosed):
        while True:
            client.recv(SECONDS)
    return client.close_code


def test_a_conversation(live: Live, tokenizer: Tokenizer) -> None:
    with opened(live) as client:
        create(client, max_output_tokens=9)
        first = until(client, *ENDS)
        assert text_of(first) == said(tokenizer, "<|user|>hello<|assistant|>", 9)
        create(client, "more", max_output_tokens=30, previous_response_id=first[0]["response"]["id"])
        second = until(client, *ENDS)
        prompt = f"<|user|>hello<|assistant|>{text_of(first)}<|user|>more<|assistant|>"
        assert text_of(second) == said(tokenizer, prompt, 30)
        assert client.response is not None
        assert client.response.headers["x-request-id"]
        assert "sec-websocket-extensions" not in client.response.headers


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "key"}])
def test_a_wrong_key_is_refused_in_the_handshake(live: Live, headers: dict[str, str]) -> None:
    with pytest.raises(InvalidStatus) as refused:
        opened(live, additional_headers=headers)
    response = refused.value.response
    assert response.status_code == 401
    assert json.loads(response.body or b"")["error"]["code"] == "invalid_api_key"


def test_keys_in_the_url_are_refused_and_never_logged(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for query, headers in (("api_key=s3cret", {}), ("a=b&api_key=s3cret", KEY)):
        with pytest.raises(InvalidStatus) as refused:
            opened(live, f"/v1/responses?{query}", additional_headers=headers)
        assert refused.value.response.status_code == 401
        assert "api_key" in json.loads(refused.value.response.body or b"")["error"]["param"]
    with opened(live, "/v1/responses?other=s3cret"):
        pass
    server = [record for record in caplog.records if not record.name.startswith("websockets.client")]
    assert not any("s3cret" in record.getMessage() for record in server)
    assert not any("Bearer" in record.getMessage() for record in server)
    assert not any(record.levelno >= logging.WARNING for record in server)


def test_other_sites_pages_are_refused(live: Live) -> None:
    own = f"http://127.0.0.1:{live.port}"
    with opened(live, origin=own):
        pass
    with pytest.raises(InvalidStatus) as refused:
        opened(live, origin="http://evil.example")
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize("path", ["/v1/models", "/", "/health", "/nowhere"])
def test_other_paths_take_no_websocket(live: Live, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        opened(live, path)
    assert refused.value.response.status_code == 404


def test_openai_client(live: Live, tokenizer: Tokenizer) -> None:
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="key", max_retries=0) as client,
        client.responses.connect() as connection,
    ):
        connection.response.create(model="tiny", input="hello", max_output_tokens=9)
        text, last = "", None
        for event in connection:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.incomplete":
                last = event.response
                break
        assert last is not None
        assert text == last.output_text == said(tokenizer, "<|user|>hello<|assistant|>", 9)
        connection.response.create(model="other", input="hello", stream_id="s")
        error = connection.recv()
        assert error.type == "error"
        assert (error.status, error.error.code, error.stream_id) == (404, "model_not_found", "s")
        connection.response.create(input="more", max_output_tokens=3, previous_response_id=last.id)
        second = next(event for event in connection if event.type == "response.incomplete")
        assert second.response.previous_response_id == last.id


def test_openai_async_client_with_several_at_once(live: Live, tokenizer: Tokenizer) -> None:
    async def talk() -> dict[str, str]:
        texts: dict[str, str] = {}
        ended = 0
        async with (
            openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="key", max_retries=0) as client,
            client.responses.connect() as connection,
        ):
            for at in range(8):
                await connection.response.create(input=f"{at}", max_output_tokens=12, stream_id=f"{at}")
            async for event in connection:
                if event.type == "response.output_text.delta":
                    assert event.stream_id is not None
                    texts[event.stream_id] = texts.get(event.stream_id, "") + event.delta
                ended += event.type == "response.incomplete"
                if ended == 8:
                    return texts
        raise AssertionError("it ended early")

    texts = asyncio.run(talk())
    assert texts == {f"{at}": said(tokenizer, f"<|user|>{at}<|assistant|>", 12) for at in range(8)}


def test_a_client_that_leaves_aborts(make_live: Callable[..., Live]) -> None:
    live = make_live(auto=False)
    with opened(live) as client:
        for _ in range(3):
            create(client)
        live.wait(lambda: len(live.engine.streams) == 3)
        live.call(live.engine.step)
    live.wait(lambda: all(stream.aborted for stream in live.engine.streams))
    live.wait(lambda: not live.server.state.generations and not live.server.state.streams)


def frame(opcode: int, data: bytes, *, fin: bool = True, masked: bool = True) -> bytes:
    """As on the wire (RFC 6455), with a mask of zeros."""
    size = len(data)
    head = struct.pack("!B", opcode | 0x80 * fin)
    mask = 0x80 * masked
    if size < 126:
        head += struct.pack("!B", size | mask)
    elif size < 1 << 16:
        head += struct.pack("!BH", 126 | mask, size)
    else:
        head += struct.pack("!BQ", 127 | mask, size)
    return head + b"\0\0\0\0" * masked + data


def handshake(headers: str = "") -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\nAuthorization: Bearer key\r\n{headers}\r\n"
    ).encode()


@contextlib.contextmanager
def raw(live: Live) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", live.port), SECONDS) as connection:
        yield connection


@contextlib.contextmanager
def raw_opened(live: Live) -> Iterator[socket.socket]:
    with raw(live) as connection:
        connection.sendall(handshake())
        assert received(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 101")
        yield connection


def close_code(data: bytes) -> int:
    """Of the close frame that the server's last bytes are."""
    at = data.rfind(b"\x88")
    code: int = struct.unpack("!H", data[at + 2 : at + 4])[0]
    return code


CREATE = json.dumps({"type": "response.create", "input": "hello", "max_output_tokens": 3}).encode()


def bad_handshake(live: Live, tokenizer: Tokenizer) -> None:
    good = handshake()
    wrong = [
        (good.replace(b"Version: 13", b"Version: 12"), b"400"),
        (good.replace(b"Sec-WebSocket-Key", b"Sec-Nothing"), b"400"),
        (good.replace(b"GET ", b"POST ").replace(b"\r\n\r\n", b"\r\nContent-Length: 0\r\n\r\n"), b"4"),
        (handshake("Content-Length: 2\r\n") + b"{}", b"400"),
        (handshake("Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n", b"400"),
        (handshake(f"X-Long: {'x' * 20_000}\r\n"), b"431"),
        (good.replace(b"/v1/responses", b"/v1/\xff\xfe"), b""),
        (good.replace(b"GET /v1/responses", b"GET /" + b"x" * 20_000), b"414"),
    ]
    for data, status in wrong:
        with raw(live) as connection:
            connection.sendall(data)
            answer = closed(connection)
            assert answer.startswith(b"HTTP/1.1 " + status if status else b""), (data[:99], answer)
            assert not answer.startswith(b"HTTP/1.1 101")


def large_frames(live: Live, tokenizer: Tokenizer) -> None:
    half = b" " * (1 << 19)
    large = [
        frame(1, b" " * ((1 << 20) + 1)),
        frame(1, half, fin=False) + frame(0, half, fin=False) + frame(0, b" "),
        frame(1, b"")[:1] + struct.pack("!BQ", 0xFF, 1 << 40),  # only announced
    ]
    for data in large:
        with raw_opened(live) as connection:
            connection.sendall(data)
            assert close_code(closed(connection)) == 1009


def fragments(live: Live, tokenizer: Tokenizer) -> None:
    with raw_opened(live) as connection:
        parts = [CREATE[at : at + 7] for at in range(0, len(CREATE), 7)]
        for at, part in enumerate(parts):
            connection.sendall(frame(0 if at else 1, part, fin=at == len(parts) - 1) + frame(9, b"ping"))
        received(connection, b'"type":"response.incomplete"')
    with raw_opened(live) as connection:  # as large as may be
        connection.sendall(frame(1, CREATE.ljust(1 << 20)))
        received(connection, b'"type":"response.incomplete"')


def bad_frames(live: Live, tokenizer: Tokenizer) -> None:
    wrong = [
        (frame(1, CREATE, masked=False), 1002),
        (frame(3, b"x"), 1002),
        (frame(0, b"x"), 1002),
        (b"\xf1\x80\0\0\0\0", 1002),  # reserved bits
        (frame(9, b"x" * 126), 1002),
        (frame(1, b"\xff\xfe"), 1007),
        (b"GET / HTTP/1.1\r\n\r\n", 1002),
    ]
    for data, code in wrong:
        with raw_opened(live) as connection:
            connection.sendall(data)
            assert close_code(closed(connection)) == code, data


def binary_and_bad_json(live: Live, tokenizer: Tokenizer) -> None:
    with opened(live) as client:
        for message in (b"\0\1", "{", "[" * 500_000, '{"a":' * 100_000, "null", '"x"', ""):
            client.send(message)
            assert until(client, "error")[-1]["status"] == 400
        create(client, max_output_tokens=2)
        until(client, "response.incomplete")


def half_close(live: Live, tokenizer: Tokenizer) -> None:
    for data in (b"", frame(1, CREATE)[:10], frame(1, b"{}", fin=False)):
        with raw_opened(live) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            closed(connection)


def reset(live: Live, tokenizer: Tokenizer) -> None:
    for _ in range(5):
        with raw_opened(live) as connection:
            connection.sendall(frame(1, CREATE.replace(b": 3", b": 300")))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def stalled_reader(live: Live, tokenizer: Tokenizer) -> None:
    """A small buffer, long responses one after the other, none of them read: it is cut, and nothing stays."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(SECONDS)
        connection.connect(("127.0.0.1", live.port))
        connection.sendall(handshake())
        repeated = {str(at): "b" * 512 for at in range(16)}  # by three events of each response
        body = {"type": "response.create", "input": "a", "metadata": repeated, "max_output_tokens": 1}
        text = frame(1, json.dumps(body).encode())
        end = time.monotonic() + SECONDS
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.monotonic() < end:
                connection.sendall(text)
                time.sleep(0.002)  # those that come too fast are refused, in few words


MISBEHAVIOURS = [
    *(bad_handshake, large_frames, fragments, bad_frames, binary_and_bad_json, half_close, reset),
    stalled_reader,
]


@pytest.fixture(scope="module")
def strict(tokenizer: Tokenizer) -> Iterator[Live]:
    """It has little patience with readers."""
    server = Live(tokenizer, api_keys=("key",), send_timeout=0.5)
    yield server
    assert server.end() == 0


@pytest.mark.parametrize("misbehave", MISBEHAVIOURS, ids=lambda each: each.__name__)
def test_other_streams_go_on(
    strict: Live, tokenizer: Tokenizer, misbehave: Callable[[Live, Tokenizer], None]
) -> None:
    over = threading.Event()
    expected = said(tokenizer, "<|user|>hello<|assistant|>", 300)

    def over_sse() -> int:
        rounds = 0
        body = {"input": "hello", "max_output_tokens": 300, "ignore_eos": True, "stream": True}
        while not (over.is_set() and rounds):
            with httpx.stream(
                "POST", f"{strict.url}/v1/responses", json=body, headers=KEY, timeout=SECONDS
            ) as answer:
                lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line[:5] == "data:"]
            events = [json.loads(line) for line in lines]
            assert text_of(events) == expected
            assert [event["type"] in ENDS for event in events[-2:]] == [False, True]
            rounds += 1
        return rounds

    def over_socket() -> int:
        rounds = 0
        with opened(strict) as client:
            while not (over.is_set() and rounds):
                create(client, max_output_tokens=300, ignore_eos=True)
                assert text_of(until(client, *ENDS)) == expected
                rounds += 1
        return rounds

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(each) for each in (over_sse, over_socket) * 3]
        try:
            misbehave(strict, tokenizer)
        finally:
            over.set()
        assert all(stream.result() for stream in streams)
    strict.wait(lambda: not strict.server.state.generations and not strict.server.state.streams)
    strict.wait(lambda: not strict.engine.active)
    assert strict.server.state.queue.prompts == 0


@contextlib.contextmanager
def unread(
    live: Live, full: Callable[[OrderlyWebSocketProtocol], bool]
) -> Iterator[tuple[socket.socket, OrderlyWebSocketProtocol]]:
    """A socket whose client reads nothing of what it asks for, until the server's side is `full`."""
    state = live.server.state
    body = {"type": "response.create", "input": "a", "metadata": {f"{at}": "x" * 512 for at in range(16)}}
    text = frame(1, json.dumps({**body, "max_output_tokens": 1}).encode())
    with raw_opened(live) as connection:
        (protocol,) = live.server.server_state.connections
        assert isinstance(protocol, OrderlyWebSocketProtocol)
        while not full(protocol):
            asked = len(live.engine.streams)
            connection.sendall(text)
            while len(live.engine.streams) == asked:
                live.idle(0.001)
            live.wait(lambda: not state.generations or full(protocol))
        yield connection, protocol


def test_a_client_that_breaks_the_protocol_and_does_not_read_is_cut(
    make_live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OrderlyWebSocketProtocol, "linger_seconds", 0.2)
    live = make_live(api_keys=("key",))
    with unread(live, lambda protocol: not protocol.writable.is_set()) as (connection, _):
        connection.sendall(frame(3, b""))
        live.wait(lambda: not live.server.server_state.connections)


def test_a_client_that_answers_no_ping_is_cut(make_live: Callable[..., Live]) -> None:
    """Even if a little of what it was sent is left, for which a close would wait."""
    live = make_live(api_keys=("key",))
    with unread(live, lambda protocol: protocol.transport.get_write_buffer_size() > 0) as (_, protocol):
        protocol.ping_timeout = 0.1
        live.call(protocol.send_keepalive_ping)
        live.wait(lambda: not live.server.server_state.connections)
    live.wait(lambda: not live.server.state.streams)


def test_an_idle_socket_may_stay(make_live: Callable[..., Live]) -> None:
    live = make_live(api_keys=("key",), receive_timeout=0.2, send_timeout=0.2, keep_alive=0.2)
    with opened(live) as client:
        for _ in range(2):
            create(client, max_output_tokens=2)
            until(client, *ENDS)
            live.idle(0.5)


def test_shutdown(make_live: Callable[..., Live]) -> None:
    """What runs ends, an idle socket is closed at once, and nothing new begins."""
    live = make_live(auto=False)
    with opened(live) as idle, opened(live) as busy:
        create(busy, max_output_tokens=2)
        until(busy, "response.created")
        live.server.stop_soon()
        assert ending(idle) == 1001
        create(busy)
        assert until(busy, "error")[-1]["status"] == 503
        with pytest.raises(InvalidStatus) as refused:
            opened(live)
        assert refused.value.response.status_code == 503
        live.call(live.engine.step)
        live.call(live.engine.step)
        assert until(busy, *ENDS)[-1]["type"] == "response.incomplete"
        assert ending(busy) == 1001
    live.thread.join(20)
    assert live.end() == 0


@pytest.mark.parametrize("second_signal", [True, False])
def test_end_of_patience(make_live: Callable[..., Live], second_signal: bool) -> None:
    live = make_live(auto=False, shutdown_timeout=300.0 if second_signal else 0.1)
    with opened(live) as client:
        create(client)
        create(client)
        until(client, "response.created")
        until(client, "response.created")
        live.server.stop_soon()
        if second_signal:
            live.server.stop_soon()
        events = [*until(client, "response.failed"), *until(client, "response.failed")]
        assert len({event["response_id"] for event in events if event["type"] == "response.failed"}) == 2
        assert ending(client) == 1001
    live.thread.join(20)
    assert live.end() == 0


def test_death_of_the_engine(make_live: Callable[..., Live]) -> None:
    live = make_live(auto=False)
    with opened(live) as client:
        create(client)
        until(client, "response.created")
        live.call(lambda: live.engine.die("killed"))
        assert "killed" in until(client, *ENDS)[-1]["response"]["error"]["message"]
        assert ending(client) == 1001
    live.thread.join(20)
    assert live.end() == 1
