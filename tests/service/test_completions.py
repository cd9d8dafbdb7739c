"""POST /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.asgi import exchange, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


def says(tokenizer: Tokenizer, *texts: str) -> Callable[..., list[int]]:
    """A script: sample `i` says the i-th text, or the last."""

    def script(prompt: list[int], params: Any, index: int) -> list[int]:
        text = texts[min(index, len(texts) - 1)]
        return tokenizer.encode(text, add_special_tokens=False) * params.max_tokens

    return script


async def test_reply(service: Service, tokenizer: Tokenizer) -> None:
    reply = await post(service.app, PATH, {"model": "tiny", "prompt": "hello world", "max_tokens": 3})
    tokens = tokenizer.encode("hello world", add_special_tokens=True)
    body = reply.json()
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    (choice,) = body["choices"]
    said = (tokens * 3)[:3]
    assert choice == {
        "index": 0,
        "text": tokenizer.decode(said, skip_special_tokens=True),
        "finish_reason": "length",
        "stop_reason": None,
        "logprobs": None,
    }
    assert body["usage"] == {
        "prompt_tokens": len(tokens),
        "completion_tokens": 3,
        "total_tokens": len(tokens) + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    params = service.engine.streams[0].params
    assert (params.max_tokens, params.n, params.temperature, params.logprobs) == (3, 1, 1.0, None)


async def test_parameters_reach_the_engine(service: Service) -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": -(1 << 63),
    }
    body = given | {"prompt": "a", "max_tokens": 4, "logit_bias": {"7": -100}, "stop_token_ids": [9]}
    assert (await post(service.app, PATH, body)).status == 200
    params = service.engine.streams[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert (params.logit_bias, params.stop_token_ids) == ({7: -100.0}, (9,))


async def test_defaults(service: Service) -> None:
    for top_k in (-1, 0):
        await post(service.app, PATH, {"prompt": "a", "top_k": top_k})
    first, second = (stream.params for stream in service.engine.streams)
    assert first.max_tokens == 16
    assert first.top_k == second.top_k == 0
    assert 0 <= first.seed < 1 << 63
    assert first.seed != second.seed


async def test_nulls_mean_left_out(service: Service) -> None:
    names = ["max_tokens", "temperature", "top_p", "n", "stream", "stop", "seed", "logit_bias", "echo"]
    reply = await post(service.app, PATH, {"prompt": "a"} | dict.fromkeys(names))
    assert reply.status == 200
    assert service.engine.streams[0].params.temperature == 1.0


@pytest.mark.parametrize(
    ("prompt", "count"), [("a b", 1), (["a", "b", "c"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2)]
)
async def test_prompt_forms(service: Service, prompt: Any, count: int) -> None:
    reply = await post(service.app, PATH, {"prompt": prompt, "max_tokens": 2, "n": 2})
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(2 * count))
    assert len(service.engine.streams) == count
    prompts = [stream.prompt for stream in service.engine.streams]
    if isinstance(prompt[0], int):
        assert prompts == [prompt]
    if isinstance(prompt[0], list):
        assert prompts == prompt
    assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert reply.json()["usage"]["completion_tokens"] == 4 * count


async def test_several_prompts_stream_prompt_major(make_service: Callable[..., Service]) -> None:
    service = make_service()
    reply = await post(
        service.app, PATH, {"prompt": ["a b c", "d e f", "1 2 3"], "n": 2, "max_tokens": 5, "stream": True}
    )
    texts = [""] * 6
    for event in reply.events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    whole = await post(service.app, PATH, {"prompt": ["a b c", "d e f", "1 2 3"], "n": 2, "max_tokens": 5})
    assert texts == [choice["text"] for choice in whole.json()["choices"]]
    assert len(set(texts)) == 6
    assert reply.events[-1] == "[DONE]"


async def test_the_tokenizer_s_own_eos_is_no_stop_reason(make_service: Callable[..., Service]) -> None:
    """As in vLLM, where a model's other eos tokens and those that a client gives are."""
    own = Tokenizer(tiny_tokenizers.byte_level(), eos="<|end|>")
    service = make_service(script=says(own, "hello<|end|>"))
    service.state.tokenizer = own
    (eos,) = own.encode("<|end|>", add_special_tokens=False)
    for fields, reason in (
        ({}, None),
        ({"ignore_eos": True, "stop_token_ids": [eos]}, eos),
        ({"stop": "o"}, "o"),
    ):
        reply = await post(service.app, PATH, {"prompt": "a", "max_tokens": 9, **fields})
        (choice,) = reply.json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


async def test_eos_ends_it_and_is_counted_but_not_shown(
    make_service: Callable[..., Service], tokenizer: Tokenizer
) -> None:
    service = make_service(script=says(tokenizer, "hello<|end|>"))
    for skip in (True, False):
        body = {"prompt": "a", "max_tokens": 9, "return_token_ids": True, "skip_special_tokens": skip}
        reply = await post(service.app, PATH, body)
        (choice,) = reply.json()["choices"]
        tokens = tokenizer.encode("hello<|end|>", add_special_tokens=False)
        assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")
        assert choice["stop_reason"] == tokens[-1]
        assert choice["token_ids"] == tokens
        assert choice["prompt_token_ids"] == tokenizer.encode("a", add_special_tokens=True)
        assert reply.json()["usage"]["completion_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "prompt", "field"),
    [
        (PATH, {"prompt": "a " * 50}, "echo"),
        (PATH, {"prompt": "a " * 50}, "return_token_ids"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a " * 50}]},
            "return_token_ids",
        ),
    ],
)
async def test_prompts_are_not_repeated_without_end(
    service: Service, monkeypatch: pytest.MonkeyPatch, path: str, prompt: dict[str, Any], field: str
) -> None:
    """A short body would have an answer of gigabytes, which is made at once."""
    monkeypatch.setattr("quire.service.api.request_params.MAX_REPEATED_BYTES", 1200)
    body = {**prompt, "max_tokens": 1, "temperature": 1.0, field: True}
    assert (await post(service.app, path, {**body, "n": 1})).status == 200
    reply = await post(service.app, path, {**body, "n": 16})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "n")
    assert "ask for fewer choices" in reply.json()["error"]["message"]
    assert (await post(service.app, path, {**body, "n": 16, field: False})).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_string(make_service: Callable[..., Service], tokenizer: Tokenizer, stream: bool) -> None:
    service = make_service(script=says(tokenizer, "abc d STOP more"))
    body = {
        "prompt": "a",
        "max_tokens": 60,
        "stop": ["never", "d ST"],
        "stream": stream,
        "return_token_ids": True,
    }
    reply = await post(service.app, PATH, body)
    choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "abc "
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "d ST"
    upto = tokenizer.encode("abc d ST", add_special_tokens=False)
    assert [token for choice in choices for token in choice["token_ids"]] == upto
    assert service.engine.streams[0].aborted


async def test_stop_string_waits_for_min_tokens(
    make_service: Callable[..., Service], tokenizer: Tokenizer
) -> None:
    service = make_service(script=says(tokenizer, "ababab"))
    body = {"prompt": "a", "max_tokens": 6, "stop": "b", "min_tokens": 3}
    reply = await post(service.app, PATH, body)
    assert len(tokenizer.encode("ababab", add_special_tokens=False)) == 6
    assert reply.json()["choices"][0]["text"] == "aba"
    assert reply.json()["usage"]["completion_tokens"] == 4


async def test_stop_string_of_one_sample_leaves_the_others(
    make_service: Callable[..., Service], tokenizer: Tokenizer
) -> None:
    service = make_service(script=says(tokenizer, "aaSTOPaaaa", "bbbbbbbbb"))
    reply = await post(service.app, PATH, {"prompt": "a", "max_tokens": 8, "stop": "STOP", "n": 2})
    first, second = reply.json()["choices"]
    assert (first["text"], first["finish_reason"]) == ("aa", "stop")
    assert (second["text"], second["finish_reason"]) == ("b" * 8, "length")
    (stream,) = service.engine.streams
    assert not stream.aborted
    assert stream.done == [len(tokenizer.encode("aaSTOP", add_special_tokens=False)), 8]  # no token more


async def test_logprobs(service: Service, tokenizer: Tokenizer) -> None:
    reply = await post(service.app, PATH, {"prompt": "abc", "max_tokens": 3, "logprobs": 2})
    a, b, c = tokenizer.encode("abc", add_special_tokens=False)
    text = tokenizer.token_text
    logprobs = reply.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"] == [{text(t): -0.5, text(t + 1): -1.5} for t in (a, b, c)]


async def test_logprobs_by_token_id(service: Service, tokenizer: Tokenizer) -> None:
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
    logprobs = (await post(service.app, PATH, body)).json()["choices"][0]["logprobs"]
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    assert logprobs["tokens"] == [f"token_id:{token}"]
    assert logprobs["top_logprobs"] == [{f"token_id:{token}": -0.5}]


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_with_logprobs(service: Service, stream: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1, "stream": stream}
    reply = await post(service.app, PATH, body)
    choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "abcab"
    joined: dict[str, list[Any]] = {name: [] for name in choices[0]["logprobs"]}
    for choice in choices:
        for name, values in choice["logprobs"].items():
            joined[name] += values
    assert joined["tokens"] == list("abcab")
    assert joined["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert joined["text_offset"] == [0, 1, 2, 3, 4]
    assert joined["top_logprobs"][0] is None


async def test_echo_alone_scores_a_prompt(service: Service) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
    reply = await post(service.app, PATH, body)
    (choice,) = reply.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == list("abc")
    assert reply.json()["usage"]["completion_tokens"] == 0


async def test_offsets_in_an_echo_count_characters_of_which_tokens_are_parts(
    service: Service, tokenizer: Tokenizer
) -> None:
    """A token that starts or ends within a character has that of the characters that are whole before it."""
    prompt = "na\u00efve \u65e5 x"
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}
    (choice,) = (await post(service.app, PATH, body)).json()["choices"]
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(prompt, add_special_tokens=True)]
    before = [b"".join(pieces[:at]) for at in range(len(pieces) + 1)]
    assert choice["text"].startswith(prompt)
    assert choice["logprobs"]["text_offset"] == [len(each.decode(errors="ignore")) for each in before]


async def test_special_tokens_count_in_offsets_where_the_echo_has_them(
    service: Service, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("a<|end|>b", add_special_tokens=False)
    for fields, text, offsets in (
        ({"prompt": "a<|end|>b"}, "a<|end|>b", [0, 1, 8]),
        ({"prompt": tokens, "skip_special_tokens": False}, "a<|end|>b", [0, 1, 8]),
        ({"prompt": tokens}, "ab", [0, 1, 1]),
    ):
        reply = await post(service.app, PATH, {**fields, "max_tokens": 0, "echo": True, "logprobs": 0})
        (choice,) = reply.json()["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


async def test_echo_of_token_ids(service: Service, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("hello the", add_special_tokens=False)
    reply = await post(service.app, PATH, {"prompt": prompt, "max_tokens": 1, "echo": True})
    assert reply.json()["choices"][0]["text"] == tokenizer.decode(
        prompt + prompt[:1], skip_special_tokens=True
    )


async def test_prompt_logprobs(service: Service, tokenizer: Tokenizer) -> None:
    reply = await post(service.app, PATH, {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 2})
    _, b = tokenizer.encode("ab", add_special_tokens=False)
    first, second = reply.json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        str(b): {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        str(b + 1): {"logprob": -1.5, "rank": 2, "decoded_token": tokenizer.token_text(b + 1)},
    }


async def test_cached_tokens(service: Service) -> None:
    service.engine.cached_tokens = 2
    reply = await post(service.app, PATH, {"prompt": ["abc", "abcd"], "max_tokens": 1})
    assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_usage_in_each_chunk(service: Service) -> None:
    """Also of a token that has no text, as vLLM sends it; at the end it is what the stream's end says."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a😀", "max_tokens": 4, "stream": True, "stream_options": options}
    events = (await post(service.app, PATH, body)).events
    *chunks, end = events[:-1]
    assert [event["choices"][0]["text"] for event in chunks] == ["a", "", "", "😀"]
    usages = [event["usage"] for event in chunks]
    assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3, 4]
    assert [usage["total_tokens"] for usage in usages] == [5, 6, 7, 8]
    assert (end["choices"], end["usage"]) == ([], usages[-1])


async def test_usage_in_each_chunk_is_of_its_choice(service: Service) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["ab", "abcd"], "n": 2, "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, end = (await post(service.app, PATH, body)).events[:-1]
    last = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks}
    asked = [(last[i]["prompt_tokens"], last[i]["completion_tokens"]) for i in range(4)]
    assert asked == [(2, 3), (2, 3), (4, 3), (4, 3)]
    assert (end["usage"]["prompt_tokens"], end["usage"]["completion_tokens"]) == (6, 12)


async def test_usage_in_each_chunk_is_of_a_stream_with_usage(service: Service) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    reply = await post(service.app, PATH, body)
    assert reply.status == 400
    assert "continuous_usage_stats needs include_usage: true" in reply.json()["error"]["message"]


async def test_stream_bytes(service: Service) -> None:
    """To the byte: what is not the text is put together by hand."""
    body = {"prompt": 'a"\n', "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    reply = await post(service.app, PATH, body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = reply.events
    head = {
        "id": events[0]["id"],
        "object": "text_completion",
        "created": events[0]["created"],
        "model": "tiny",
    }
    texts, reasons = ["a", '"', "\n"], [None, None, "length"]
    expected = []
    for text, reason in zip(texts, reasons, strict=True):
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        expected.append({**head, "choices": [choice], "usage": None})
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    expected.append({**head, "choices": [], "usage": usage})

    def canonical(event: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(event, sort_keys=True))

    assert [canonical(event) for event in events[:-1]] == [canonical(event) for event in expected]
    blocks = reply.body.split(b"\n\n")
    assert all(block.startswith(b"data: ") for block in blocks[:-1])
    assert (blocks[-2], blocks[-1]) == (b"data: [DONE]", b"")
    assert b"\r" not in reply.body
    assert [list(json.loads(block[6:])) for block in blocks[:-2]] == [
        ["object", "id", "created", "model", "choices", "usage"]
    ] * 4


async def test_stream_of_characters_in_several_tokens(service: Service, tokenizer: Tokenizer) -> None:
    prompt = "🙂é"
    count = len(tokenizer.encode(prompt, add_special_tokens=False))
    assert count > 2
    reply = await post(service.app, PATH, {"prompt": prompt, "max_tokens": count, "stream": True})
    texts = [event["choices"][0]["text"] for event in reply.events[:-1]]
    assert "".join(texts) == prompt
    assert not any("�" in text for text in texts)


async def test_admission(service: Service) -> None:
    long = "a " * 500
    for body, param, status, code in (
        ({"prompt": long}, "prompt", 400, "context_length_exceeded"),
        ({"prompt": "a b", "max_tokens": 1000}, "max_tokens", 400, "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": 30, "n": 60}, "max_tokens", 400, "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": 1, "n": 128}, "n", 400, "invalid_value"),
        ({"prompt": "a", "best_of": 128}, "best_of", 400, "invalid_value"),
        ({"prompt": "", "max_tokens": 1}, "prompt", 400, "invalid_value"),
        ({"prompt": [5, 320]}, "prompt", 400, "invalid_value"),
        ({"prompt": "a", "logit_bias": {"320": 1}}, "logit_bias", 400, "invalid_value"),
        ({"prompt": "a", "stop_token_ids": [320]}, "stop_token_ids", 400, "invalid_value"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", 400, "invalid_value"),
        ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens", 400, "invalid_value"),
        ({"prompt": "a", "model": "other"}, "model", 404, "model_not_found"),
    ):
        reply = await post(service.app, PATH, body)
        assert (reply.status, reply.error["param"], reply.error["code"]) == (status, param, code), body
    assert service.state.queue.prompts == 0
    assert not service.engine.active


async def test_default_max_tokens_shrinks_to_the_room_there_is(service: Service) -> None:
    prompt = [65] * 395
    reply = await post(service.app, PATH, {"prompt": prompt})
    assert reply.status == 200
    assert service.engine.streams[0].params.max_tokens == 5


async def test_other_served_name_is_answered_with(service: Service) -> None:
    reply = await post(service.app, PATH, {"prompt": "a", "model": "alias"})
    assert reply.json()["model"] == "alias"


async def test_full_queue(make_service: Callable[..., Service]) -> None:
    service = make_service(auto=False, max_num_queued_reqs=2)
    waiting = exchange(service.app, PATH, {"prompt": "a", "max_tokens": 1})
    await service.engine.until_added(1)
    reply = await post(service.app, PATH, {"prompt": ["b", "c"]})
    assert reply.status == 429
    assert reply.error["code"] == "queue_full"
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    service.engine.step()
    assert (await waiting.finish()).status == 200
    service.engine.auto = True
    assert (await post(service.app, PATH, {"prompt": ["a", "b"]})).status == 200
    assert service.state.queue.prompts == 0


async def test_more_prompts_than_may_ever_queue_are_no_matter_of_trying_again(
    make_service: Callable[..., Service],
) -> None:
    service = make_service(max_num_queued_reqs=2)
    reply = await post(service.app, PATH, {"prompt": ["a", "b", "c"]})
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert "3 prompts" in reply.error["message"] and "at most 2" in reply.error["message"]
    assert "retry-after" not in reply.headers
