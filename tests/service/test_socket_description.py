"""What /openapi.json says of the WebSockets' frames, held against what they take and send."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.service.api.openapi import describe
from tests.service.asgi_socket import Socket
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
DOCUMENT = describe("0")
ASKED = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4},
}


def validator(path: str, side: str) -> Draft202012Validator:
    return Draft202012Validator(
        {**DOCUMENT["x-websockets"][path][side], "components": DOCUMENT["components"]}
    )


def schemas_of(path: str, frame: dict[str, Any]) -> set[str]:
    """The server's frames that this one may be."""
    fitting = set()
    for each in DOCUMENT["x-websockets"][path]["server"]["anyOf"]:
        if Draft202012Validator({**each, "components": DOCUMENT["components"]}).is_valid(frame):
            fitting.add(each["$ref"].rpartition("/")[2])
    return fitting


async def talk(service: Service, path: str, said: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what comes of one frame."""
    socket = Socket(service.app, path).start()
    socket.say(said)
    frames = await socket.until(lambda frames: any("done" in frame or "error" in frame for frame in frames))
    socket.leave()
    return frames


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    "more",
    [
        {"tag": "a"},
        {"n": 2, "logprobs": True, "top_logprobs": 2, "user": "me"},
        {"stream_options": {"include_usage": True}, "return_token_ids": True, "tag": "ü"},
        {"stream": False, "tag": "a"},
    ],
    ids=str,
)
async def test_answers_are_of_the_frames_that_are_described(
    service: Service, path: str, more: dict[str, Any]
) -> None:
    if path == "/v1/completions" and "top_logprobs" in more:
        more = {"n": 2, "logprobs": 2, "user": "me"}
    said = {**ASKED[path], **more}
    validator(path, "client").validate(said)
    *parts, last = await talk(service, path, said)
    kind = "Chat" if "chat" in path else "Completion"
    form = f"{kind}ReplyFrame" if more.get("stream") is False else f"{kind}Chunk"
    assert parts and all(form in schemas_of(path, frame) for frame in parts)
    assert not any({"DoneFrame", "ErrorFrame"} & schemas_of(path, frame) for frame in parts)
    assert schemas_of(path, last) == {"DoneFrame"}
    assert {frame.get("tag") for frame in (*parts, last)} == {more.get("tag")}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    "wrong",
    [
        {"tag": 1},
        {"tag": "x" * 65},
        {"temperature": 9},
        {"unknown": 1},
        {"cancel": 1},
        {"cancel": "a", "n": 1},
    ],
    ids=str,
)
async def test_what_is_not_described_is_an_error_frame(
    service: Service, path: str, wrong: dict[str, Any]
) -> None:
    said = wrong if "cancel" in wrong else {**ASKED[path], **wrong}
    assert not validator(path, "client").is_valid(said)
    (refusal,) = await talk(service, path, said)
    assert schemas_of(path, refusal) == {"ErrorFrame"}


async def test_a_cancel_is_described(service: Service) -> None:
    validator("/v1/completions", "client").validate({"cancel": "a"})
    (refusal,) = await talk(service, "/v1/completions", {"cancel": "a"})
    assert schemas_of("/v1/completions", refusal) == {"ErrorFrame"}
    assert schemas_of("/v1/completions", {"done": True, "cancelled": True, "tag": "a"}) == {"DoneFrame"}


async def test_responses_are_events_or_refusals(service: Service) -> None:
    path = "/v1/responses"
    create = {"type": "response.create", "input": "abc", "max_output_tokens": 4, "stream_id": "s"}
    validator(path, "client").validate(create)
    validator(path, "client").validate({"type": "response.cancel", "response_id": "resp_1"})
    socket = Socket(service.app, path).start()
    socket.say(create)
    await socket.until_type("response.incomplete")
    assert all(schemas_of(path, event) == {"ResponseEvent"} for event in socket.events)
    assert {event["stream_id"] for event in socket.events} == {"s"}
    socket.cancel("nobody")
    assert schemas_of(path, await socket.until_type("error")) == {"ResponseRefusal"}
    socket.leave()
