"""A page of another origin in a real browser: with a key, over SSE and WebSocket, to server and router."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page

from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.cluster.stub_replica import LiveRouter
from tests.docs.pages import API, blocks
from tests.service import tiny_tokenizers
from tests.service.conftest import CHAT_TEMPLATE
from tests.service.live import Live

KEY = "openai-insecure-api-key.secret"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
STREAM = """async ({ url, key, body }) => {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${key}` };
  const request = { method: "POST", headers, body: JSON.stringify(body) };
  const answer = await fetch(url + "/v1/chat/completions", request);
  return { status: answer.status, id: answer.headers.get("x-request-id"), text: await answer.text() };
}"""
TALK = """({ url, protocols, ask, end }) => new Promise((resolve) => {
  const socket = new WebSocket(url, protocols), frames = [];
  socket.onopen = () => socket.send(JSON.stringify(ask));
  socket.onmessage = ({ data }) => {
    frames.push(JSON.parse(data));
    if (new RegExp(end).test(data)) socket.close(1000);
  };
  socket.onclose = ({ code }) => resolve({ code, protocol: socket.protocol, frames });
})"""


class Site(BaseHTTPRequestHandler):
    """Another site's page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>Another site</title><body></body>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Yield its origin."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@dataclass(frozen=True)
class Servers:
    """A server and a router that ask for a key and know the site, and a server that does not know it."""

    server: str
    router: str
    closed: str


@pytest.fixture(scope="module")
def servers(site: str) -> Iterator[Servers]:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(CHAT_TEMPLATE, {}))
    keys = ("another", "secret")
    server = Live(tokenizer, api_keys=keys, cors_origins=(site,))
    closed = Live(tokenizer, api_keys=keys)
    router = LiveRouter([closed], api_keys=keys, cors_origins=(site,))  # replicas need not know of sites
    yield Servers(server.url, router.url, closed.url)
    for each in (router, server, closed):
        each.end()


@pytest.fixture(scope="module")
def foreign(browser: Browser, site: str) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(site)
    yield page
    page.close()


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(frame["choices"][0]["delta"]["content"] for frame in frames if frame.get("choices"))


@pytest.mark.parametrize("kind", ["server", "router"])
def test_a_named_sites_page_streams_with_its_key(foreign: Page, servers: Servers, kind: str) -> None:
    body = {**CHAT, "stream": True}
    url = getattr(servers, kind)
    answer = foreign.evaluate(STREAM, {"url": url, "key": "secret", "body": body})
    assert (answer["status"], answer["text"].endswith("data: [DONE]\n\n")) == (200, True)
    assert answer["id"]
    refused = foreign.evaluate(STREAM, {"url": url, "key": "wrong", "body": body})
    assert (refused["status"], "invalid_api_key" in refused["text"]) == (401, True)


SOCKETS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "tag": "t"}, '"done":true'),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 5}, '"done":true'),
    (
        "/v1/responses",
        {"type": "response.create", "input": "hello", "max_output_tokens": 5},
        '"type":"response.incomplete"',
    ),
]


@pytest.mark.parametrize("kind", ["server", "router"])
@pytest.mark.parametrize(("path", "ask", "end"), SOCKETS)
def test_its_sockets_take_the_key_as_a_subprotocol(
    foreign: Page, servers: Servers, kind: str, path: str, ask: dict[str, Any], end: str
) -> None:
    url = getattr(servers, kind).replace("http", "ws", 1) + path
    for protocols, spoken in (([KEY, "quire"], "quire"), ([KEY], KEY)):
        talk = foreign.evaluate(TALK, {"url": url, "protocols": protocols, "ask": ask, "end": end})
        assert (talk["code"], talk["protocol"]) == (1000, spoken)
        assert len(talk["frames"]) >= 2
    wrong = ["openai-insecure-api-key.wrong", "quire"]
    talk = foreign.evaluate(TALK, {"url": url, "protocols": wrong, "ask": ask, "end": end})
    assert (talk["code"], talk["frames"]) == (1006, [])


def test_the_text_is_the_same_over_both(foreign: Page, servers: Servers) -> None:
    whole = foreign.evaluate(STREAM, {"url": servers.server, "key": "secret", "body": CHAT})
    path, ask, end = SOCKETS[0]
    url = servers.server.replace("http", "ws", 1) + path
    talk = foreign.evaluate(TALK, {"url": url, "protocols": [KEY, "quire"], "ask": ask, "end": end})
    text = text_of(talk["frames"])
    assert text and f'"content":"{text}"' in whole["text"]


def test_a_server_that_does_not_name_the_site_tells_its_page_nothing(foreign: Page, servers: Servers) -> None:
    with pytest.raises(Error, match="Failed to fetch"):
        foreign.evaluate(STREAM, {"url": servers.closed, "key": "secret", "body": CHAT})
    path, ask, end = SOCKETS[0]
    url = servers.closed.replace("http", "ws", 1) + path
    talk = foreign.evaluate(TALK, {"url": url, "protocols": [KEY, "quire"], "ask": ask, "end": end})
    assert (talk["code"], talk["frames"]) == (1006, [])


def test_the_five_lines_of_the_documentation_show_an_answer(foreign: Page, servers: Servers) -> None:
    (program,) = (text for text in blocks("js", API) if "WebSocket" in text)
    assert len(program.splitlines()) == 5
    for shown, real in (("http://127.0.0.1:8000", servers.server), ("api-key.KEY", "api-key.secret")):
        program = program.replace(shown.removeprefix("http://"), real.removeprefix("http://"))
    foreign.evaluate(f"() => {{ {program} }}")
    foreign.wait_for_function("document.body.textContent.includes('KV cache')")
