"""An error quotes so much of what a client sent as one can read, however much that was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.asgi import post
from tests.service.asgi_socket import Socket
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hello"}]
LONG = "x" * (300 << 10)
UNKNOWN = "it is not supported here"
MOST = 10 << 10  # bytes: a client's own limits on what it reads are larger

SAID: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", LONG: 1}, UNKNOWN),
    ("/v1/chat/completions", {"messages": HELLO, "reasoning": {LONG: 1}}, UNKNOWN),
    ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}, "developer"),
    ("/v1/responses", {"input": [{"type": LONG}]}, "item_reference"),
    ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": HELLO, LONG: 1}, UNKNOWN),
    ("/api/chat", {"model": "tiny", "messages": [{"role": LONG}]}, "assistant"),
]


@pytest.mark.parametrize("path, body, advice", SAID)
async def test_what_is_wrong_is_cut_and_what_to_do_is_not(
    service: Service, path: str, body: dict[str, Any], advice: str
) -> None:
    answer = await post(service.app, path, body)
    assert answer.status == 400
    assert len(answer.body) < MOST
    assert advice in answer.body.decode()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_frame_of_an_error_fits_into_a_client(service: Service, path: str) -> None:
    """One that is too large would end the socket, and with it the other answers on it."""
    socket = Socket(service.app, path).start()
    socket.say({"type": "response.create", LONG: 1})
    await socket.until(bool)
    assert len(socket.sent[-1]["text"]) < MOST
    socket.leave()
