"""/docs shows the whole API without loading anything, and /version says whose it is."""

from __future__ import annotations

import asyncio
import re
import threading
from html.parser import HTMLParser

import pytest

import quire
from quire.service.api import about
from quire.service.api.openapi import describe
from tests.service.asgi import get
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio


class Page(HTMLParser):
    """Names, links, and what else is loaded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        assert tag not in ("script", "link", "img") and "src" not in given and "style" not in given
        self.names |= {str(given["id"])} if "id" in given else set()
        self.links += [str(given["href"])] if "href" in given else []

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_every_endpoint_and_every_field_is_on_the_page(service: Service) -> None:
    reply = await get(service.app, "/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(reply.body.decode())
    document = describe("0")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in page.text and operation["summary"] in page.text
    for path, socket in document["x-websockets"].items():
        assert f"WS {path}" in page.text and socket["summary"] in page.text
    for name, schema in document["components"]["schemas"].items():
        assert name in page.names
        assert all(field in page.text for field in schema.get("properties", ()))
    inside = {link[1:] for link in page.links if link.startswith("#")}
    assert inside <= page.names
    assert {link for link in page.links if not link.startswith("#")} == {"/", "/openapi.json"}
    assert "messages, required" in page.text
    assert "integer, 1 to 128" in page.text
    assert "-d '{}'" not in page.text  # each example asks for something


async def test_its_style_is_all_that_its_policy_allows(service: Service) -> None:
    reply = await get(service.app, "/docs")
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert len(re.findall("<style>", reply.body.decode())) == 1


async def test_the_version_is_told(service: Service) -> None:
    assert (await get(service.app, "/version")).json() == {"version": quire.__version__}


async def test_the_document_is_made_once_and_holds_up_nobody(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def slow(version: str) -> dict[str, str]:
        threads.append(threading.current_thread())
        return {"version": version}

    monkeypatch.setattr(about, "describe", slow)
    replies = await asyncio.gather(*(get(service.app, "/openapi.json") for _ in range(3)))
    assert [reply.json() for reply in replies] == [{"version": quire.__version__}] * 3
    assert len(threads) == 1 and threads[0] is not threading.current_thread()
