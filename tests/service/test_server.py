"""The real server on a real port: the openai client, sockets that misbehave, signals and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from quire.service.config import ServiceConfig
from quire.service.engine_client import Engine
from quire.service.errors import ServerFailed, not_ready
from quire.service.http import lifecycle
from quire.service.server import serve
from quire.service.text.tokenizer import Tokenizer
from tests.service.fake_engine import FakeEngine, make_info
from tests.service.live import Live

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_openai_chat(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == "tiny"
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=6, n=2, logprobs=True, top_logprobs=3, seed=1
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    assert [len(entry.top_logprobs) for entry in content] == [3] * 6
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12
    said = cast(Any, reply.choices[0].message.model_dump())
    assert None in said.values()
    client.chat.completions.create(model="tiny", messages=[*HELLO, said, *HELLO], max_tokens=1)


def test_openai_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=9, n=2)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=9, n=2, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length", "length"]
    assert usage is not None
    assert usage == whole.usage


def test_openai_async_stream(live: Live) -> None:
    async def one(client: openai.AsyncOpenAI, at: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=f"{at} a b", max_tokens=8, stream=True, stop="zzz"
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="key", max_retries=0) as client:
            return await asyncio.gather(*(one(client, at) for at in range(8)))

    texts = asyncio.run(all_of_them())
    assert [text[0] for text in texts] == [str(at) for at in range(8)]


def test_openai_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=2, logprobs=1, echo=True)
    assert [choice.text for choice in reply.choices] == ["abab", "cdcd"]
    assert reply.choices[1].logprobs is not None
    assert reply.choices[1].logprobs.tokens == ["c", "d", "c", "d"]


def test_openai_errors(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0).models.list()


def request_bytes(body: dict[str, Any], headers: str = "", spaces: int = 0) -> bytes:
    data = json.dumps(body).encode() + b" " * spaces
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer key\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    )
    return head.encode() + data


@pytest.mark.parametrize("spaces", [0, 100_000])
@pytest.mark.parametrize("stream", [True, False])
def test_socket_that_closes_aborts(make_live: Callable[..., Live], stream: bool, spaces: int) -> None:
    """Of a long body so much comes at once that the server reads no more until it has been taken."""
    live = make_live(auto=False)
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        request = request_bytes({"prompt": "ab", "max_tokens": 300, "stream": stream}, spaces=spaces)
        head, body = request.split(b"{", 1)
        connection.sendall(head + b"{")
        live.wait(lambda: any(each.cycle for each in list(live.server.server_state.connections)))
        connection.sendall(body)
        live.wait(lambda: bool(live.engine.streams))
        live.call(live.engine.step)
        if stream:
            assert b"200 OK" in connection.recv(4096)
    live.wait(lambda: live.engine.streams[0].aborted)
    live.wait(lambda: not live.server.state.generations)


def test_stalled_reader_is_dropped(make_live: Callable[..., Live]) -> None:
    """A real socket whose buffers are full; the connection does not linger."""
    live = make_live(send_timeout=0.3)
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": "ab", "max_tokens": 380, "stream": True, "logprobs": 20, "n": 4}
        for _ in range(30):  # pipelined: together more than any buffer
            connection.sendall(request_bytes(body))
        live.wait(lambda: bool(live.engine.streams))
        live.wait(lambda: not live.server.server_state.connections)


def received(connection: socket.socket, text: bytes) -> bytes:
    """All that comes, up to `text`."""
    data = b""
    while text not in data:
        part = connection.recv(65536)
        assert part, f"closed before {text!r}: {data!r}"
        data += part
    return data


@contextlib.contextmanager
def one_token_of_two(live: Live) -> Iterator[socket.socket]:
    """A stream that has had its first token."""
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        body = {"prompt": "ab", "max_tokens": 2, "stream": True}
        connection.sendall(request_bytes(body, "Connection: close\r\n"))
        live.wait(lambda: bool(live.engine.streams))
        live.call(live.engine.step)
        received(connection, b'"text":"a"')
        yield connection


@pytest.mark.parametrize("late", [False, True])
def test_a_stream_that_is_interrupted_as_it_ends_has_one_end(
    make_live: Callable[..., Live], late: bool
) -> None:
    """Its last token is on its way to it, or its end is out, of which its task hears a turn later."""
    live = make_live(auto=False)

    def interrupt() -> None:
        for generation in list(live.server.state.generations):
            generation.interrupt(not_ready("the server is shutting down"))

    def end() -> None:
        loop = asyncio.get_running_loop()
        live.engine.step()
        loop.call_soon(interrupt) if late else interrupt()

    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        for _ in range(2):
            served = len(live.engine.streams)
            connection.sendall(request_bytes({"prompt": "ab", "max_tokens": 2, "stream": True}))
            live.wait(lambda: bool(live.server.state.generations))
            assert len(live.engine.streams) == served + 1
            live.call(live.engine.step)
            live.call(end)
            data = received(connection, b"0\r\n\r\n")
            assert (data.count(b"data: [DONE]"), data.count(b'data: {"error"')) == (late, not late)
            live.wait(lambda: not live.server.state.generations)


def last_event(connection: socket.socket) -> bytes:
    """The stream's last, when the server has closed it in order."""
    data = closed(connection)
    assert data.endswith(b"0\r\n\r\n")
    return data.split(b"data: ")[-1].split(b"\n\n")[0]


def closed(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            data += part
    return data


def test_many_clients_that_come_at_once_wait_for_few_turns_of_the_loop(
    make_live: Callable[..., Live],
) -> None:
    live = make_live()
    loop, connections = live.server._loop, live.server.server_state.connections
    assert loop is not None
    come, taken, turns = threading.Event(), threading.Event(), 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(connections) < 64:
            loop.call_soon(turn)
        else:
            taken.set()

    loop.call_soon_threadsafe(lambda: (come.wait(10), turn()))
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=10))
        come.set()
        assert taken.wait(10)
    assert turns < 10


def test_headers_have_limits(make_live: Callable[..., Live]) -> None:
    live = make_live(receive_timeout=1.0, max_header_bytes=10_000)
    for start in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000):
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            connection.sendall(start)
            assert closed(connection) == b""
    with socket.create_connection(("127.0.0.1", live.port)) as connection:  # an idle one may stay
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert received(connection, b'{"status":"ok"}').startswith(b"HTTP/1.1 200 OK")
            live.idle(1.2)


def test_drain(make_live: Callable[..., Live], caplog: pytest.LogCaptureFixture) -> None:
    """Not ready at once; what runs may end, what is new is refused; then exit 0."""
    caplog.set_level("INFO")
    live = make_live(auto=False)
    with one_token_of_two(live) as running:
        live.server.stop_soon()
        live.wait(lambda: live.server.state.draining)
        live.wait(lambda: live.engine.draining)  # so that a registry's routers hear of it
        assert httpx.get(f"{live.url}/ready").status_code == 503
        refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        live.call(live.engine.step)
        assert last_event(running) == b"[DONE]"
    live.thread.join(20)
    assert live.end() == 0
    assert live.engine.stopped
    assert "finishing 1 answer, up to 30 s; another Ctrl-C or SIGTERM ends now" in caplog.messages
    assert not [line for line in caplog.messages if "cut off" in line]


def ask(connection: socket.socket, path: str) -> None:
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


@pytest.mark.parametrize("second_signal", [True, False])
def test_routers_learn_of_a_drain_before_connections_end(
    make_live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, second_signal: bool
) -> None:
    """A request that comes as its connection is closed could not be sent to another replica."""
    monkeypatch.setattr(lifecycle, "PROBED_SECONDS", 300.0)
    live = make_live()
    with contextlib.ExitStack() as stack:
        probed, idle, other = (
            stack.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=10))
            for _ in range(3)
        )
        for connection, path in ((probed, "/ready"), (idle, "/health")):
            ask(connection, path)
            received(connection, b"}")
        live.server.stop_soon()
        live.wait(lambda: live.server.state.draining)
        for connection, path in ((probed, "/ready"), (idle, "/v1/models")):
            ask(connection, path)
            answer = closed(connection).lower()
            assert answer.startswith(b"http/1.1 503 ")
            assert b"connection: close\r\n" in answer
        assert live.thread.is_alive()
        if second_signal:
            live.server.stop_soon()
            assert closed(other) == b""
    live.thread.join(20)  # nobody is connected any more
    assert live.end() == 0


def test_no_router_is_waited_for_where_none_is(
    make_live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PROBED_SECONDS", 300.0)
    live = make_live()
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        ask(connection, "/health")
        received(connection, b"}")
        live.server.stop_soon()
        assert closed(connection) == b""
    live.thread.join(20)
    assert live.end() == 0


@pytest.mark.parametrize("second_signal", [True, False])
def test_end_of_patience(make_live: Callable[..., Live], second_signal: bool) -> None:
    live = make_live(auto=False, shutdown_timeout=300.0 if second_signal else 0.1)
    with one_token_of_two(live) as running:
        live.server.stop_soon()
        if second_signal:
            live.server.stop_soon()
        assert json.loads(last_event(running))["error"]["code"] == "not_ready"
    live.thread.join(20)
    assert live.end() == 0


def test_death_of_the_engine_ends_the_server(make_live: Callable[..., Live]) -> None:
    live = make_live(auto=False)
    with one_token_of_two(live) as running:
        live.call(lambda: live.engine.die("killed"))
        assert "killed" in json.loads(last_event(running))["error"]["message"]
    live.thread.join(5)
    assert not live.thread.is_alive()
    assert live.end() == 1


def test_failing_start_ends_the_server(tokenizer: Tokenizer) -> None:
    async def fails() -> Engine:
        raise ValueError("no model there")

    def no_tokenizer() -> Tokenizer:
        raise ValueError("no tokenizer there")

    async def starts() -> Engine:
        return FakeEngine(make_info(tokenizer)).become_ready()

    config = ServiceConfig(served_model_names=("tiny",), port=0)
    starters: list[tuple[Callable[[], Awaitable[Engine]], Callable[[], Tokenizer]]] = [
        (fails, lambda: tokenizer),
        (starts, no_tokenizer),
    ]
    for start_engine, load_tokenizer in starters:
        with pytest.raises(ServerFailed):
            serve(config, start_engine, load_tokenizer)


def test_port_in_use(live: Live, tokenizer: Tokenizer) -> None:
    async def starts() -> Engine:
        return FakeEngine(make_info(tokenizer))

    config = ServiceConfig(served_model_names=("tiny",), port=live.port)
    with pytest.raises(ServerFailed, match=f"cannot listen on 127.0.0.1, port {live.port}"):
        serve(config, starts, lambda: tokenizer)


PROGRAM = """
import asyncio, sys
from quire.service.config import ServiceConfig
from quire.service.server import serve

async def start_engine():
    await asyncio.Event().wait()  # a start that takes for ever: the port answers all the same

sys.exit(serve(ServiceConfig(served_model_names=("m",), port=int(sys.argv[1])), start_engine, lambda: None))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_loading(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(port)], cwd=root)
    try:
        tick = threading.Event()
        while True:
            assert process.poll() is None
            with contextlib.suppress(httpx.ConnectError):
                assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 503
                break
            tick.wait(0.05)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as following:
            following.sendall(b"GET /startup HTTP/1.1\r\nHost: localhost\r\n\r\n")
            tick.wait(0.2)
            process.send_signal(number)
            told = closed(following)
        assert told.startswith(b"HTTP/1.1 503 Service Unavailable") and b"shutting down" in told
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_nothing_heavy_is_imported_before_the_port_is_bound() -> None:
    """The port answers within a second of start: these alone would take it."""
    code = "import sys, quire.cli, quire.service.commands.serve; print(*sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "numpy",
        "transformers",
        "triton",
        "tokenizers",
        "jinja2",
        "prometheus_client",
        "pydantic",
        "rich",
        "huggingface_hub",
        "llguidance",
        "quire.engine.process",
    }
    assert not heavy & set(done.stdout.split())


def test_a_request_imports_nothing_heavy() -> None:
    """It would hold up the event loop. What the port does not wait for is imported before requests come."""
    code = """if True:
    import sys
    from importlib import import_module
    from quire.engine.capacity import Capacity
    from quire.engine.messages import Request, SamplingParams
    from quire.service.app import create_app
    from quire.service.server import LATE_IMPORTS

    for late in LATE_IMPORTS:
        import_module(late)
    before = set(sys.modules)
    capacity = Capacity(num_blocks=8, block_size=4, max_num_seqs=2, max_model_len=32, vocab_size=100)
    capacity.check(Request(1, [1, 2], SamplingParams()))
    print(*set(sys.modules) - before)
    """
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert not done.stdout.split()
