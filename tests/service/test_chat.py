"""POST /v1/chat/completions and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from quire.service.errors import TemplateError
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.asgi import post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def test_reply(service: Service, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("<|user|>hello<|assistant|>", add_special_tokens=False)
    reply = await post(service.app, PATH, {"messages": HELLO, "max_tokens": 4, "return_token_ids": True})
    body = reply.json()
    assert service.engine.streams[0].prompt == prompt
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    tokens = (prompt * 4)[:4]
    assert body["choices"] == [
        {
            "index": 0,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": tokens,
            "prompt_token_ids": prompt,
            "message": {
                "role": "assistant",
                "content": tokenizer.decode(tokens, skip_special_tokens=True),
                "refusal": None,
                "annotations": [],
            },
            "logprobs": None,
        }
    ]
    assert body["usage"]["total_tokens"] == len(prompt) + 4


async def test_max_tokens_left_out_is_the_rest_of_the_context(service: Service) -> None:
    await post(service.app, PATH, {"messages": HELLO})
    (stream,) = service.engine.streams
    assert stream.params.max_tokens == 400 - len(stream.prompt)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit(service: Service, name: str) -> None:
    await post(service.app, PATH, {"messages": HELLO, name: 7})
    assert service.engine.streams[0].params.max_tokens == 7


async def test_stream_bytes(service: Service, tokenizer: Tokenizer) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "stream": True, "n": 2}
    reply = await post(service.app, PATH, body)
    first = reply.events[0]
    head = (
        f'data: {{"object":"chat.completion.chunk","id":"{first["id"]}","created":{first["created"]},'
        '"model":"tiny","choices":[{"index":%d,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
    )
    # sample 0 says <|user|> (special: shown as nothing, so no chunk) and h; sample 1 says h and e...
    script = service.engine.script
    stream = service.engine.streams[0]
    texts = [
        [
            tokenizer.decode([token], skip_special_tokens=True)
            for token in script(stream.prompt, stream.params, index)
        ]
        for index in range(2)
    ]
    assert texts[0][0] == ""
    delta = '{"role":"assistant","refusal":null,"content":%s}'
    expected = head % (1, delta % json.dumps(texts[1][0]), "null")
    expected += head % (0, delta % json.dumps(texts[0][1]), '"length"')
    expected += head % (1, '{"content":%s}' % json.dumps(texts[1][1]), '"length"')  # noqa: UP031
    assert reply.body.decode() == expected + "data: [DONE]\n\n"


async def test_logprobs(service: Service, tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2, "stream": stream}
        reply = await post(service.app, PATH, body | {"skip_special_tokens": False})
        choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json()["choices"]
        content = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        first = service.engine.streams[-1].prompt[0]
        assert content[0] == {
            "token": "<|user|>",
            "logprob": -0.5,
            "bytes": list(b"<|user|>"),
            "top_logprobs": [
                {
                    "token": tokenizer.token_text(token),
                    "logprob": -0.5 - at,
                    "bytes": list(tokenizer.token_bytes(token)),
                }
                for at, token in enumerate((first, first + 1))
            ],
        }
        assert len(content) == 2


async def test_logprobs_without_candidates(service: Service) -> None:
    reply = await post(service.app, PATH, {"messages": HELLO, "max_tokens": 1, "logprobs": True})
    (entry,) = reply.json()["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []


async def test_content_parts_and_roles(service: Service, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    body = {"messages": messages, "max_tokens": 1, "add_generation_prompt": False}
    await post(service.app, PATH, body)
    expected = "<|assistant|>a<|user|>b\nc"
    assert service.engine.streams[0].prompt == tokenizer.encode(expected, add_special_tokens=False)


async def test_model_without_template(make_service: Callable[..., Service]) -> None:
    service = make_service()
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level())
    reply = await post(service.app, PATH, {"messages": HELLO})
    assert reply.status == 400
    assert "'tiny' has no chat template" in reply.error["message"]
    assert reply.error["code"] == "no_chat_template"


async def test_template_kwargs(make_service: Callable[..., Service]) -> None:
    service = make_service()
    body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    reply = await post(service.app, PATH, body)
    assert (reply.status, reply.headers["x-quire-ignored"]) == (200, "chat_template_kwargs.enable_thinking")
    template = "{{ 'no' if enable_thinking is false else 'yes' }}{{ messages[0].content }}"
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(template, {}))
    for asked in (body, {"messages": HELLO, "max_tokens": 1, "reasoning_effort": "none"}):
        reply = await post(service.app, PATH, asked)
        prompt = service.engine.streams[-1].prompt
        assert service.state.tokenizer.decode(prompt, skip_special_tokens=True) == "nohello"
        assert "x-quire-ignored" not in reply.headers


async def test_refusal_by_the_template(make_service: Callable[..., Service]) -> None:
    service = make_service()
    template = ChatTemplate("{{ raise_exception('only cats') }}", {})
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), template)
    reply = await post(service.app, PATH, {"messages": HELLO})
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "only cats" in reply.error["message"]


def render(source: str, **special: str) -> str:
    return ChatTemplate(source, special).render(
        [{"role": "user", "content": "<b>"}], add_generation_prompt=True
    )


def test_template_surroundings() -> None:
    """What transformers gives templates, and templates of real models use."""
    assert render("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s><b>"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<b>"}]'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% if tools %}x{% endif %}  {% generation %}y{% endgeneration %}") == "  y"
    assert render("{%- if true %}\n  a\n{%- endif %}") == "  a"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].nothing.at.all }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_template_in_a_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_template_that_does_not_compile() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% if %}", {})
