"""The Responses WebSocket, and streams that are picked up again, through a router to real servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ollama
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from quire.service.tracing import exporter
from tests.cluster.stub_replica import LiveRouter
from tests.service import tiny_tokenizers
from tests.service.collector import Collector
from tests.service.conftest import CHAT_TEMPLATE
from tests.service.live import Live
from tests.service.test_resumption import events_of
from tests.service.test_socket_server import ENDS, create, ending, text_of, until

KEY = {"Authorization": "Bearer key"}
BODY: dict[str, Any] = {"prompt": "a b c", "max_tokens": 40, "stream": True}
SECONDS = 30.0
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(CHAT_TEMPLATE, {}))


class Cluster:
    """Two servers around engines without a model, and routers in front of them."""

    def __init__(self, tokenizer: Tokenizer, **config: Any) -> None:
        self.replicas = [Live(tokenizer, api_keys=("key",), **config) for _ in range(2)]
        self.routers = [self.add_router()]

    def add_router(self, **config: Any) -> LiveRouter:
        return LiveRouter(self.replicas, api_keys=("key",), **config)

    @property
    def router(self) -> LiveRouter:
        return self.routers[0]

    def prefer(self, at: int) -> Live:
        """The router sends there what it may send anywhere."""
        self.router.prefer(self.replicas[at])
        return self.replicas[at]

    def opened(self, router: LiveRouter | None = None, **options: Any) -> ClientConnection:
        options.setdefault("additional_headers", KEY)
        port = (router or self.router).port
        return connect(f"ws://127.0.0.1:{port}/v1/responses", open_timeout=SECONDS, **options)

    def end(self) -> None:
        for server in (*self.routers, *self.replicas):
            server.end()


@pytest.fixture(scope="module")
def cluster(tokenizer: Tokenizer) -> Iterator[Cluster]:
    """Of engines that step by themselves."""
    made = Cluster(tokenizer)
    yield made
    made.end()


@pytest.fixture
def make_cluster(tokenizer: Tokenizer) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(**config: Any) -> Cluster:
        made.append(Cluster(tokenizer, **config))
        return made[-1]

    yield make
    for each in made:
        each.end()


def step(live: Live, count: int = 1) -> None:
    for _ in range(count):
        live.call(live.engine.step)


def cut(live: Live) -> None:
    """As a machine vanishes: its connections break off."""

    def abort() -> None:
        for connection in list(live.server.server_state.connections):
            connection.transport.abort()

    live.call(abort)


def test_a_conversation_stays_with_its_replica(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.router.url}/v1", api_key="key", max_retries=0)
    with client, client.responses.connect() as connection:
        previous: Any = openai.omit
        for at in range(4):
            cluster.prefer(at % 2)  # which is not asked again
            connection.response.create(input=f"{at}", max_output_tokens=5, previous_response_id=previous)
            last = next(event for event in connection if event.type in (*ENDS, "error"))
            assert last.type == "response.incomplete"
            previous = last.response.id


def test_a_stored_response_is_found_where_it_is(cluster: Cluster) -> None:
    """By a router that sent the request, and by one that did not."""
    client = openai.OpenAI(base_url=f"{cluster.router.url}/v1", api_key="key", max_retries=0)
    other = cluster.add_router()
    cluster.prefer(0)
    first = client.responses.create(model="tiny", input="a", max_output_tokens=5)
    cluster.prefer(1)
    second = client.responses.create(
        model="tiny", input="b", max_output_tokens=5, previous_response_id=first.id
    )
    assert client.responses.retrieve(first.id) == first
    other.prefer(cluster.replicas[1])
    stranger = openai.OpenAI(base_url=f"{other.url}/v1", api_key="key", max_retries=0)
    third = stranger.responses.create(
        model="tiny", input="c", max_output_tokens=5, previous_response_id=second.id
    )
    assert stranger.responses.retrieve(third.id) == third
    assert len(list(stranger.responses.input_items.list(third.id))) == 5
    stranger.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    other.end()


@pytest.mark.parametrize("at", [0, 1])
def test_a_socket_goes_on_from_a_response_where_it_is_stored(cluster: Cluster, at: int) -> None:
    """If its first message does: by a router that knows where, and by one that asks, with either key."""
    other = cluster.add_router()
    cluster.prefer(at)
    url = f"{cluster.router.url}/v1/responses"
    asked = {"model": "tiny", "input": "a", "max_output_tokens": 2}
    previous = httpx.post(url, json=asked, headers=KEY, timeout=SECONDS).json()["id"]
    cluster.prefer(1 - at)
    other.prefer(cluster.replicas[1 - at])
    by_protocol: dict[str, Any] = {
        "additional_headers": {},
        "subprotocols": ["openai-insecure-api-key.key", "quire"],
    }
    for router, options in ((cluster.router, {}), (other, {}), (other, by_protocol)):
        with cluster.opened(router, **options) as client:
            create(client, previous_response_id=previous, store=True, max_output_tokens=2)
            last = until(client, *ENDS, "error")[-1]
            assert (last["type"], last["response"]["previous_response_id"]) == (
                "response.incomplete",
                previous,
            )
            previous = last["response"]["id"]
        stored = httpx.get(f"{router.url}/v1/responses/{previous}", headers=KEY)
        assert stored.status_code == 200
        assert stored.headers["x-quire-route"].endswith("attempt=1")  # it knows where
    with cluster.opened() as client:  # which stays where its first message went
        for named in ({}, {"previous_response_id": previous}, {"previous_response_id": "../health"}, {}):
            create(client, max_output_tokens=2, **named)
            last = until(client, *ENDS, "error")[-1]
            if named:
                assert last["error"]["code"] == "previous_response_not_found"
            else:
                assert last["type"] == "response.incomplete"
    other.wait(lambda: all(each.in_flight in (0, 100) for each in other.server.state.replicas))
    other.end()


def test_the_other_apis_go_through(cluster: Cluster) -> None:
    """Anthropic's events and Ollama's lines, and their errors."""
    import anthropic  # which takes seconds

    url, hello = cluster.router.url, [{"role": "user", "content": "hello"}]
    with anthropic.Anthropic(base_url=url, api_key="key", max_retries=0) as client:
        whole = client.messages.create(model="tiny", max_tokens=9, messages=hello)  # type: ignore[arg-type]
        with client.messages.stream(model="tiny", max_tokens=9, messages=hello) as stream:  # type: ignore[arg-type]
            assert stream.get_final_message().usage == whole.usage
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=9, messages=hello)  # type: ignore[arg-type]
    ollamas = ollama.Client(url, headers=KEY)
    *parts, last = ollamas.chat("tiny", hello, stream=True, options={"num_predict": 9})
    assert len(parts) > 1 and (last.done, last.eval_count) == (True, 9)
    refused = httpx.post(f"{url}/api/chat", json={"model": "tiny"})
    assert (refused.status_code, list(refused.json())) == (401, ["error", "code"])


def test_the_gate_is_the_routers(cluster: Cluster) -> None:
    own = f"http://127.0.0.1:{cluster.router.port}"
    with cluster.opened(origin=own) as client:
        create(client, max_output_tokens=2)
        until(client, *ENDS)
    for options, status in (
        ({"origin": "http://evil.example"}, 403),
        ({"additional_headers": {}}, 401),
    ):
        with pytest.raises(InvalidStatus) as refused:
            cluster.opened(**options)
        assert refused.value.response.status_code == status
    with cluster.opened() as client:
        client.send(" " * (1 << 20) + "{}")
        assert ending(client) == 1009
    with cluster.opened() as client:
        client.send("{")
        assert until(client, "error")[-1]["error"]["code"] == "invalid_json"
        create(client, max_output_tokens=2)
        until(client, *ENDS)


def test_a_client_that_leaves_aborts(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(auto=False)
    replica = cluster.prefer(0)
    with cluster.opened() as client:
        for _ in range(3):
            create(client)
            until(client, "response.created")
    replica.wait(lambda: all(stream.aborted for stream in replica.engine.streams))
    cluster.router.wait(lambda: not cluster.router.server.state.generations)


def test_a_replica_that_drains_or_is_lost(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(auto=False)
    replica = cluster.prefer(0)
    with cluster.opened() as idle, cluster.opened() as busy:
        create(busy, max_output_tokens=2)
        until(busy, "response.created")
        replica.server.stop_soon()
        assert ending(idle) == 1001
        step(replica, 2)
        assert until(busy, *ENDS, "error")[-1]["type"] == "response.incomplete"
        assert ending(busy) == 1001
    replica = cluster.prefer(1)
    with cluster.opened() as client:
        create(client, max_output_tokens=2)
        ended = until(client, "response.created")[-1]
        step(replica, 2)
        until(client, *ENDS)
        created = []
        for fields in ({}, {"stream_id": "mine"}):
            create(client, **fields)
            created += [until(client, "response.in_progress")[0]]
        cut(replica)
        *ends, last = until(client, "error")
        assert (last["error"]["code"], "response_id" in last) == ("replica_lost", False)
        with pytest.raises(ConnectionClosed):
            client.recv(SECONDS)
        assert client.close_code == 1011
    assert [end["response_id"] for end in ends] == [event["response_id"] for event in created]
    assert ended["response_id"] not in {end["response_id"] for end in ends}
    for begin, end in zip(created, ends, strict=True):
        assert (end["type"], end["sequence_number"]) == ("response.failed", 2)
        assert end.get("stream_id") == begin.get("stream_id")
        assert end["response"].pop("error")["code"] == "replica_lost"
        assert end["response"] | {"status": "in_progress", "error": None} == begin["response"]
    replica.wait(lambda: all(stream.aborted for stream in replica.engine.streams[1:]))


def test_a_router_that_drains(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(auto=False)
    replica = cluster.prefer(0)
    with cluster.opened() as idle, cluster.opened() as busy:
        create(busy, max_output_tokens=2)
        until(busy, "response.created")
        cluster.router.server.stop_soon()
        assert ending(idle) == 1001
        create(busy, max_output_tokens=2)
        assert until(busy, "error")[-1]["status"] == 503
        step(replica, 2)
        assert until(busy, *ENDS, "error")[-1]["type"] == "response.incomplete"
        assert ending(busy) == 1001
    assert len(replica.engine.streams) == 1
    cluster.router.thread.join(20)
    assert cluster.router.end() == 0


def test_what_is_refused_ends_no_other_response(make_cluster: Callable[..., Cluster]) -> None:
    """A router that drains waits for each that was asked for, whatever was refused meanwhile."""
    cluster = make_cluster(auto=False)
    replica = cluster.prefer(0)
    with cluster.opened() as client:
        for _ in range(2):
            create(client, stream_id="mine", max_output_tokens=1)  # the second waits for the first
        client.send("{")
        client.send(b"{}")
        create(client, stream_id="other", n=2)
        client.send(json.dumps({"type": "response.cancel", "response_id": 5}))
        client.send(json.dumps({"type": "response.cancel", "response_id": "r", "stream_id": "mine"}))
        refused: list[dict[str, Any]] = []
        while len(refused) < 5:
            refused.append(until(client, "error")[-1])
        assert [event.get("stream_id") for event in refused] == [None, None, "other", None, None]
        cluster.router.server.stop_soon()
        cluster.router.wait(lambda: cluster.router.server.state.draining)
        for count in (1, 2):
            replica.wait(lambda count=count: len(replica.engine.streams) == count)
            step(replica)
            assert until(client, *ENDS, "error")[-1]["type"] == "response.incomplete"
        assert ending(client) == 1001
    cluster.router.thread.join(20)
    assert cluster.router.end() == 0


def pick_up(router: LiveRouter, stream_id: str, last: str | None = None) -> httpx.Response:
    headers = KEY if last is None else {**KEY, "Last-Event-ID": last}
    return httpx.get(f"{router.url}/v1/streams/{stream_id}", headers=headers, timeout=SECONDS)


def start(router: LiveRouter, stream_id: str, events: int | None = None) -> list[tuple[str, bytes]]:
    """The first so many events; then the client leaves."""
    got: list[tuple[str, bytes]] = []
    data, headers = b"", {**KEY, "X-Stream-Id": stream_id}
    with httpx.stream(
        "POST", f"{router.url}/v1/completions", json=BODY, headers=headers, timeout=SECONDS
    ) as answer:
        assert answer.status_code == 200
        for chunk in answer.iter_raw():
            data += chunk
            got = events_of(data)
            if events is not None and len(got) >= events:
                return got[:events]
    return got


def test_a_stream_is_found_again(cluster: Cluster) -> None:
    """By the router that sent it, and by one that knows nothing of it."""
    other = cluster.add_router()
    cluster.routers.append(other)
    for at in range(4):
        cluster.prefer(at % 2)
        first = start(cluster.router, f"found-{at}", 3)
        cluster.prefer((at + 1) % 2)
        picked_up = pick_up(cluster.router, f"found-{at}", first[-1][0])
        assert picked_up.headers["x-quire-route"].endswith("attempt=1")  # it knows where
        rest = events_of(picked_up.content)
        answer = pick_up(other, f"found-{at}")
        assert events_of(answer.content) == [*first, *rest]
        assert rest[-1][1] == b"data: [DONE]"
        assert "reason=stream" in answer.headers["x-quire-route"]
        assert pick_up(other, f"found-{at}", rest[-1][0]).status_code == 204
        gone = pick_up(other, f"found-{at}", "999")
        assert (gone.status_code, gone.json()["error"]["code"]) == (400, "unknown_event")
        stopped = httpx.delete(f"{other.url}/v1/streams/found-{at}", headers=KEY)
        assert stopped.json() == {"id": f"found-{at}", "stopped": False}
    unknown = pick_up(cluster.router, "nobody's")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "stream_not_found")


def test_a_request_is_asked_about_where_it_was(cluster: Cluster) -> None:
    """By the router that sent it, and by one that knows nothing of it."""
    other = cluster.add_router()
    cluster.routers.append(other)
    for at in range(2):
        cluster.prefer(at)
        headers, body = {**KEY, "X-Request-Id": f"asked-{at}"}, {**BODY, "stream": False}
        answer = httpx.post(f"{cluster.router.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200 and "server-timing" in answer.headers
        cluster.prefer(1 - at)
        for router in (cluster.router, other):
            told = httpx.get(f"{router.url}/v1/requests/asked-{at}/why", headers=KEY)
            assert told.json()["request_id"] == f"asked-{at}"
            if router is cluster.router:
                assert told.headers["x-quire-route"].endswith("attempt=1")
    unknown = httpx.get(f"{cluster.router.url}/v1/requests/nobodys/why", headers=KEY)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(exporter, "BATCH_SECONDS", 0.0)
    made = Collector()
    yield made
    made.close()


def test_a_trace_goes_through_the_router(make_cluster: Callable[..., Cluster], collector: Collector) -> None:
    """The client's span is the parent of the router's, and that one of the replica's."""
    cluster = make_cluster(otlp_endpoint=collector.url)
    cluster.routers.append(cluster.add_router(otlp_endpoint=collector.url))
    replica, body = cluster.prefer(0), {**BODY, "stream": False}
    router = cluster.routers[1]
    router.prefer(replica)
    for each in cluster.routers:
        headers = {**KEY, "traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert httpx.post(f"{each.url}/v1/completions", json=body, headers=headers).status_code == 200
    engine = replica.engine
    replica.call(lambda: [engine.tell_end(stream) for stream in engine.streams])
    cluster.end()
    passed_on, traced = [span for span in collector.spans if span["name"].startswith("text_completion")]
    (route,) = [span for span in collector.spans if span["name"] == "route"]
    assert passed_on["parentSpanId"] == route["parentSpanId"] == PARENT
    assert traced["parentSpanId"] == route["spanId"]
    assert {span["traceId"] for span in collector.spans} == {TRACE}


def test_an_id_in_use_is_refused_wherever_a_request_would_go(cluster: Cluster) -> None:
    cluster.prefer(0)
    start(cluster.router, "used")
    cluster.prefer(1)
    headers = {**KEY, "X-Stream-Id": "used"}
    answer = httpx.post(f"{cluster.router.url}/v1/completions", json=BODY, headers=headers, timeout=SECONDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stream_id_in_use")


def test_a_stream_of_a_lost_replica(make_cluster: Callable[..., Cluster]) -> None:
    """While the connection is lost the stream goes on; with its server it is gone."""
    cluster = make_cluster(auto=False, keep_alive=0.1)  # with a comment come the headers
    replica = cluster.prefer(0)
    headers = {**KEY, "X-Stream-Id": "s"}
    url = f"{cluster.router.url}/v1/completions"
    with httpx.stream("POST", url, json=BODY, headers=headers, timeout=SECONDS) as answer:
        replica.wait(lambda: bool(replica.engine.streams))
        replica.call(replica.engine.step)
        data = b""
        for chunk in answer.iter_raw():
            data += chunk
            if events_of(data) and b"replica_lost" not in data:
                cut(replica)
    last = json.loads(data.split(b"data: ")[-1])
    assert last["error"]["code"] == "replica_lost"  # and it has no id
    ((first, _),) = events_of(data)
    step(replica, 40)
    rest = events_of(pick_up(cluster.router, "s", first).content)
    assert rest[-1][1] == b"data: [DONE]"
    assert not replica.engine.streams[0].aborted
    replica.end()
    answer = pick_up(cluster.router, "s", first)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


def test_the_text_through_a_router(cluster: Cluster) -> None:
    with cluster.opened() as client:
        create(client, max_output_tokens=9)
        over_socket = text_of(until(client, *ENDS))
    body = {"input": "hello", "max_output_tokens": 9}
    reply = httpx.post(f"{cluster.router.url}/v1/responses", json=body, headers=KEY, timeout=SECONDS).json()
    assert over_socket == reply["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tagged_answers_through_a_router(cluster: Cluster, path: str) -> None:
    """With the key as a page in a browser gives it."""
    url = f"ws://127.0.0.1:{cluster.router.port}{path}"
    protocols: Any = ["openai-insecure-api-key.key", "quire"]
    asked: dict[str, Any] = {"prompt": "hello"}
    if path != "/v1/completions":
        asked = {"messages": [{"role": "user", "content": "hello"}]}
    with connect(url, open_timeout=SECONDS, subprotocols=protocols) as client:
        assert client.subprotocol == "quire"
        for tag in "ab":
            client.send(json.dumps({**asked, "max_tokens": 9, "stream": False, "tag": tag}))
        frames = [json.loads(client.recv(SECONDS)) for _ in range(4)]
    body = {**asked, "max_tokens": 9}
    reply = httpx.post(f"{cluster.router.url}{path}", json=body, headers=KEY, timeout=SECONDS).json()
    for tag in "ab":
        whole, done = (frame for frame in frames if frame["tag"] == tag)
        assert (whole["choices"], done) == (reply["choices"], {"tag": tag, "done": True})
