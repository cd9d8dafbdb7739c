"""Responses that are kept: gone on from, read and deleted by the key that made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

import openai
import pytest

from quire.service.answer.stored_responses import ResponseStore, StoredResponse
from quire.service.api.responses.input_items import Page
from quire.service.errors import ApiError
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.asgi import Exchange, Reply, get, post
from tests.service.conftest import CHAT_TEMPLATE, Service
from tests.service.live import Live
from tests.service.test_responses import events_of

PATH = "/v1/responses"
SHORT = {"input": "hello", "max_output_tokens": 8}
# what the specification of Open Responses requires of a response, wherever there is one
REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice", "truncation"),
    *("parallel_tool_calls", "text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs"),
    *("temperature", "reasoning", "usage", "max_output_tokens", "max_tool_calls", "store", "background"),
    *("service_tier", "metadata", "safety_identifier", "prompt_cache_key"),
}


async def remove(service: Service, response_id: str, **headers: str) -> Reply:
    path = f"{PATH}/{response_id}"
    return await Exchange(service.app, "DELETE", path, b"", headers).start().finish()


async def items_of(service: Service, response_id: str, query: str) -> Any:
    exchange = Exchange(service.app, "GET", f"{PATH}/{response_id}/input_items")
    exchange.scope["query_string"] = query.encode()
    return (await exchange.start().finish()).json()


def prompt(service: Service, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(service.engine.streams[-1].prompt, skip_special_tokens=False)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_gone_on_from(service: Service, tokenizer: Tokenizer, stream: bool) -> None:
    """Its instructions are not: they are each request's own."""
    reply = await post(service.app, PATH, {**SHORT, "instructions": "be kind", "stream": stream})
    first = events_of(reply)[-1]["response"] if stream else reply.json()
    said = first["output"][0]["content"][0]["text"]
    body = {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 4}
    second = (await post(service.app, PATH, body)).json()
    assert second["previous_response_id"] == first["id"]
    assert prompt(service, tokenizer) == f"<|user|>hello<|assistant|>{said}<|user|>more<|assistant|>"


@pytest.mark.anyio
async def test_a_response_is_read_and_deleted(service: Service) -> None:
    made = await post(service.app, PATH, SHORT)
    response_id = made.json()["id"]
    read = await get(service.app, f"{PATH}/{response_id}")
    assert (read.status, read.json()) == (200, made.json())
    gone = await remove(service, response_id)
    assert gone.json() == {"id": response_id, "object": "response", "deleted": True}
    for missing in (await get(service.app, f"{PATH}/{response_id}"), await remove(service, response_id)):
        assert (missing.status, missing.error["code"]) == (404, "response_not_found")


@pytest.mark.anyio
async def test_what_is_not_to_be_stored_or_failed_is_not(service: Service) -> None:
    for more in ({"store": False}, {"input": []}):
        reply = await post(service.app, PATH, SHORT | more)
        if reply.status == 200:
            assert (await get(service.app, f"{PATH}/{reply.json()['id']}")).status == 404
    body = {**SHORT, "previous_response_id": "resp_1"}
    reply = await post(service.app, PATH, body)
    assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")
    assert reply.error["param"] == "previous_response_id"


@pytest.mark.anyio
async def test_items_of_stored_responses_can_be_referred_to(service: Service, tokenizer: Tokenizer) -> None:
    """As Vercel's AI SDK does by default."""
    first = (await post(service.app, PATH, SHORT)).json()
    (message,) = first["output"]
    reference = {"type": "item_reference", "id": message["id"]}
    items = [{"role": "user", "content": "hello"}, reference, {"role": "user", "content": "more"}]
    assert (await post(service.app, PATH, {"input": items, "max_output_tokens": 1})).status == 200
    said = message["content"][0]["text"]
    assert prompt(service, tokenizer) == f"<|user|>hello<|assistant|>{said}<|user|>more<|assistant|>"
    await remove(service, first["id"])
    gone = await post(service.app, PATH, {"input": items})
    assert (gone.status, gone.error["param"], gone.error["code"]) == (400, "input[1].id", "item_not_found")


@pytest.mark.anyio
async def test_what_was_said_is_listed(service: Service) -> None:
    """The newest first, as OpenAI does, and what responses before said and were given among it."""
    first = (await post(service.app, PATH, {"input": "one", "max_output_tokens": 3})).json()
    items = [{"role": "assistant", "content": "two"}, {"role": "user", "content": "three", "id": "msg_own"}]
    body = {"input": items, "previous_response_id": first["id"], "max_output_tokens": 3}
    path = f"{PATH}/{(await post(service.app, PATH, body)).json()['id']}/input_items"
    listed = (await get(service.app, path)).json()
    said = first["output"][0]["content"][0]["text"]
    assert [item["content"][0]["text"] for item in listed["data"]] == ["three", "two", said, "one"]
    assert [item["content"][0]["type"] for item in listed["data"]] == [
        *("input_text", "output_text", "output_text", "input_text"),
    ]
    ids = [item["id"] for item in listed["data"]]
    assert (ids[0], listed["first_id"], listed["last_id"]) == ("msg_own", ids[0], ids[-1])
    assert (await get(service.app, f"{PATH}/resp_no/input_items")).status == 404


@pytest.mark.anyio
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_only_the_responses_of_a_page_are_read(
    service: Service, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """However long the conversation; and all pages together are the whole of it."""
    previous = None
    for at in range(8):
        body = {"input": f"{at}", "previous_response_id": previous, "max_output_tokens": 1}
        previous = (await post(service.app, PATH, body)).json()["id"]
    reads: list[str] = []

    def find(store: ResponseStore, tenant: str, response_id: str) -> StoredResponse | None:
        reads.append(response_id)
        return plain_find(store, tenant, response_id)

    plain_find = ResponseStore.find
    monkeypatch.setattr(ResponseStore, "find", find)
    query, after, texts = f"limit=4&order={order}", "", []
    while True:
        reads.clear()
        page = await items_of(service, f"{previous}", query + after)
        assert len(reads) <= 4, "the response, and those whose four items these are"
        texts += [item["content"][0]["text"] for item in page["data"] if item["role"] == "user"]
        after = f"&after={page['last_id']}"
        if not page["has_more"]:
            break
    assert (texts if order == "asc" else texts[::-1]) == [f"{at}" for at in range(8)]


@pytest.mark.anyio
async def test_what_was_said_is_listed_as_far_back_as_it_is_kept(service: Service) -> None:
    ids: list[str | None] = [None]
    for at in range(4):
        body = {"input": f"{at}", "previous_response_id": ids[-1], "max_output_tokens": 1}
        ids.append((await post(service.app, PATH, body)).json()["id"])
    await remove(service, f"{ids[2]}")
    page = await items_of(service, f"{ids[4]}", "order=asc")
    assert [item["content"][0]["text"] for item in page["data"] if item["role"] == "user"] == ["2", "3"]


@pytest.mark.parametrize(
    ("query", "expected", "more"),
    [
        ("", "43210", False),
        ("limit=2", "43", True),
        ("limit=2&after=2", "10", False),
        ("limit=2&before=1", "32", True),
        ("order=asc&limit=3&after=0&before=4", "123", False),
        ("order=asc&after=4", "", False),
    ],
)
def test_pages_of_items(query: str, expected: str, more: bool) -> None:
    places, has_more = Page.of(parse_qsl(query)).places([f"{at}" for at in range(5)])
    assert ("".join(f"{at}" for at in places), has_more) == (expected, more)


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=x",
        "order=up",
        "after=7",
        "unknown=1",
        "limit=1&limit=2",
        "order=asc&order=desc",
    ],
)
def test_parameters_of_pages_are_checked(query: str) -> None:
    with pytest.raises(ApiError) as refused:
        Page.of(parse_qsl(query)).places([])
    assert (refused.value.status, refused.value.param) == (400, query.partition("=")[0])


@pytest.mark.anyio
async def test_reasoning_goes_back_as_it_came(make_service: Callable[..., Service]) -> None:
    """What it says is the chat template's to show."""
    template = (
        CHAT_TEMPLATE.replace("m.content }}", "m.content }}{{ m.reasoning_content }}") + "{# <think> #}"
    )
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(template, {}))
    tokens = tokenizer.encode("<think>so</think>yes<|end|>", add_special_tokens=False)
    service = make_service(script=lambda prompt, params, index: tokens)
    service.state.tokenizer = tokenizer
    output = (await post(service.app, PATH, {"input": "hello"})).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    others = [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}]
    question = {"role": "user", "content": "hello"}
    items = [question, *output, question, *others, {"role": "assistant", "content": "no"}, question]
    reply = await post(service.app, PATH, {"input": items})
    assert reply.status == 200, reply.body
    shown = "<|user|>hello<|assistant|>yesso<|user|>hello<|assistant|>no<|user|>hello<|assistant|>"
    assert prompt(service, tokenizer) == shown


@pytest.mark.anyio
async def test_each_key_has_its_own(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("alice", "bob"))
    alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
    response_id = (await post(service.app, PATH, SHORT, **alice)).json()["id"]
    assert (await get(service.app, f"{PATH}/{response_id}", **bob)).status == 404
    assert (await remove(service, response_id, **bob)).status == 404
    going_on = {**SHORT, "previous_response_id": response_id}
    assert (await post(service.app, PATH, going_on, **bob)).status == 400
    assert (await post(service.app, PATH, going_on, **alice)).status == 200


def test_the_store_is_bounded_and_its_room_is_shared() -> None:
    """Whoever has most loses what it has not used for longest."""
    one = StoredResponse(b"x" * 1000, [], {})
    store = ResponseStore(max_bytes=4 * one.size)
    for at in range(3):
        store.keep("many", f"{at}", one)
    store.find("many", "0")
    store.keep("few", "0", one)
    store.keep("few", "1", one)
    assert store.size == 4 * one.size
    assert store.find("many", "1") is None
    assert all(store.find(*key) is one for key in (("many", "0"), ("many", "2"), ("few", "0"), ("few", "1")))
    store.keep("few", "2", StoredResponse(b"x" * 10000, [], {}))
    assert store.size == 4 * one.size


@pytest.mark.anyio
@pytest.mark.parametrize(
    "more", [{}, {"reasoning": {"effort": "low"}, "prompt_cache_key": "a", "max_tool_calls": 3}]
)
async def test_every_property_that_is_required_is_there(service: Service, more: dict[str, Any]) -> None:
    events = events_of(await post(service.app, PATH, {**SHORT, "stream": True, **more}))
    told = [event["response"] for event in events if "response" in event]
    whole = (await post(service.app, PATH, SHORT | more)).json()
    for response in (*told, whole):
        assert set(response) >= REQUIRED
        for name, value in more.items():
            assert response[name] == value or response[name]["effort"] == "low"


@pytest.mark.anyio
async def test_when_it_was_completed(service: Service, tokenizer: Tokenizer) -> None:
    service.engine.script = lambda prompt, params, index: tokenizer.encode(
        "a<|end|>", add_special_tokens=False
    )
    whole = (await post(service.app, PATH, SHORT)).json()
    assert whole["status"] == "completed" and whole["completed_at"] >= whole["created_at"]


@pytest.mark.anyio
async def test_sampling_fields_reach_the_engine(service: Service) -> None:
    fields: dict[str, Any] = {
        "top_k": 7,
        "min_p": 0.125,
        "seed": 3,
        "logit_bias": {"65": -5.0},
        "min_tokens": 2,
    }
    fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    reply = await post(service.app, PATH, {**SHORT, **fields, "stop": ["zzz"], "stop_token_ids": [300]})
    assert reply.status == 200, reply.body
    params = service.engine.streams[-1].params
    assert (params.top_k, params.min_p, params.seed, params.min_tokens) == (7, 0.125, 3, 2)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (params.logit_bias, params.stop_token_ids) == ({65: -5.0}, (300,))
    assert (reply.json()["presence_penalty"], reply.json()["frequency_penalty"]) == (0.5, 0.25)


@pytest.mark.anyio
async def test_a_stop_string_ends_it(service: Service, tokenizer: Tokenizer) -> None:
    service.engine.script = lambda prompt, params, index: tokenizer.encode(
        "the cat", add_special_tokens=False
    )
    reply = (await post(service.app, PATH, {"input": "x", "max_output_tokens": 7, "stop": "ca"})).json()
    assert (reply["output"][0]["content"][0]["text"], reply["status"]) == ("the ", "completed")


@pytest.mark.anyio
@pytest.mark.parametrize(("text", "stop", "shown"), [("the cat", "ca", "the "), ("the", None, "the")])
async def test_log_probabilities_of_what_ends_a_text_are_streamed(
    service: Service, tokenizer: Tokenizer, text: str, stop: str | None, shown: str
) -> None:
    """Of a stop string's tokens and of the one that ends a turn, as in the whole, though no text comes."""
    said = tokenizer.encode(text + "<|end|>", add_special_tokens=False)
    service.engine.script = lambda prompt, params, index: said
    body = {"input": "x", "top_logprobs": 1, "stop": stop}
    whole = (await post(service.app, PATH, body)).json()
    (part,) = whole["output"][0]["content"]
    assert (part["text"], len(part["logprobs"])) == (shown, whole["usage"]["output_tokens"])
    events = events_of(await post(service.app, PATH, body | {"stream": True}))
    assert events[-1]["response"]["output"][0]["content"] == [part]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == shown
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]


@pytest.mark.anyio
async def test_log_probabilities(service: Service) -> None:
    """As many in a stream's deltas as in the whole; they can be sent back."""
    body = {"input": "hello", "max_output_tokens": 5, "top_logprobs": 2}
    events = events_of(await post(service.app, PATH, {**body, "stream": True}))
    told = [entry for event in events if "delta" in event for entry in event["logprobs"]]
    whole = (await post(service.app, PATH, body)).json()
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 5
    assert [entry["token"] for entry in told] == [entry["token"] for entry in entries]
    again = [*whole["output"], {"role": "user", "content": "more"}]
    assert (await post(service.app, PATH, {"input": again, "max_output_tokens": 1})).status == 200
    asked = {"input": "hello", "max_output_tokens": 2, "include": ["message.output_text.logprobs"]}
    reply = (await post(service.app, PATH, asked)).json()
    assert [entry["top_logprobs"] for entry in reply["output"][0]["content"][0]["logprobs"]] == [[], []]


@pytest.mark.anyio
async def test_what_has_no_effect_is_named(service: Service) -> None:
    """Tools that run at OpenAI among it."""
    tools = [{"type": "web_search"}, {"type": "custom", "name": "patch", "format": {"type": "text"}}]
    more = {"service_tier": "auto", "include": ["reasoning.encrypted_content"], "background": False}
    reply = await post(service.app, PATH, {**SHORT, "tools": tools, **more})
    assert (reply.status, reply.json()["tools"]) == (200, [])
    names = ["custom", "include.reasoning.encrypted_content", "service_tier", "web_search"]
    assert sorted(reply.headers["x-quire-ignored"].split(", ")) == names
    forced = await post(service.app, PATH, {**SHORT, "tools": tools, "tool_choice": {"type": "web_search"}})
    assert (forced.status, forced.error["param"]) == (400, "tool_choice.type")


def test_openai_client(live: Live) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="key", max_retries=0) as client:
        first = client.responses.create(model="tiny", input="hello", max_output_tokens=8)
        second = client.responses.create(
            model="tiny", input="more", previous_response_id=first.id, max_output_tokens=8
        )
        assert client.responses.retrieve(second.id) == second
        more: Any = {
            "include": ["reasoning.encrypted_content"],
            "include_obfuscation": False,
            "stream": False,
        }
        assert client.responses.retrieve(second.id, **more) == second
        for query in ({"stream": True}, {"include": ["x"], "starting_after": 1}, {"sparkle": 1}):
            with pytest.raises(openai.BadRequestError, match=[*query][-1]):
                client.responses.retrieve(second.id, extra_query=query)
        listed = client.responses.input_items.list(second.id, include=more["include"])
        assert [item.type for item in listed] == ["message"] * 3
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
