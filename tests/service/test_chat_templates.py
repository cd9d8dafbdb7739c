"""Chat templates for models that have none: by name or from a file, and where their turns end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.service.text.named_templates import read_template, template_names
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from quire.service.text.turn_end import TurnEnd
from tests.service import tiny_tokenizers
from tests.service.asgi import post
from tests.service.conftest import CHAT_TEMPLATE, Service
from tests.service.tool_templates import HERMES

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "ab"}]
SAID = [
    {"role": "system", "content": "s"},
    *HELLO,
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]
PROMPTS = {
    "alpaca": "<s>s\n\n### Instruction:\nab\n\n### Response:\nc\n\n### Instruction:\nd\n\n### Response:\n",
    "chatml": "<s><|im_start|>system\ns<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
    "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n",
    "plain": "<s>s\n\nUser: ab\nAssistant: c\nUser: d\nAssistant:",
    "vicuna": "<s>s\n\nUSER: ab\nASSISTANT: c</s>\nUSER: d\nASSISTANT:",
}
ENDS = {"alpaca": "\n\n### Instruction:", "chatml": "<|im_end|>", "plain": "\nUser:", "vicuna": "</s>"}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", template_names())
def test_each_name_makes_a_prompt_and_knows_the_end_of_a_turn(name: str) -> None:
    template = ChatTemplate(read_template(name), SPECIAL)
    assert template.render(SAID, add_generation_prompt=True) == PROMPTS[name]
    assert TurnEnd.of(template, {}) == TurnEnd(strings=(ENDS[name],))
    assert TurnEnd.of(template, {ENDS[name]: 7}) == TurnEnd(tokens=(7,))  # which may come without text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",  # it leaves out what the assistant said
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_an_end_that_cannot_be_told_is_none(source: str) -> None:
    assert TurnEnd.of(ChatTemplate(source, {}), {}) == TurnEnd()


def test_a_file_or_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}")
    assert read_template(str(file)) == "{{ messages }}"
    with pytest.raises(ValueError, match=r"--chat-template must be a file, or one of .*chatml.*: ChatML "):
        read_template("ChatML")


def test_a_folders_own_template_is_replaced(tmp_path: Path) -> None:
    tiny_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    own, other = (Tokenizer.from_folder(tmp_path, template) for template in (None, "plain"))
    assert own.chat_template is not None and own.chat_template.source == CHAT_TEMPLATE
    assert own.turn_end == TurnEnd()  # the model ends its turns itself
    assert other.turn_end.strings == ("\nUser:",)


def saying(tokenizer: Tokenizer, text: str) -> Callable[..., list[int]]:
    """A script: the model says this text, then a's."""
    said = tokenizer.encode(text + "a" * 40, add_special_tokens=False)
    return lambda prompt, params, index: said[: params.max_tokens]


@pytest.fixture
def plain() -> Tokenizer:
    template = ChatTemplate(read_template("plain"), {})
    return Tokenizer(tiny_tokenizers.byte_level(), template, is_own=False)


Make = Callable[..., Service]


@pytest.mark.anyio
async def test_chats_and_responses_end_with_the_turn_and_completions_do_not(
    make_service: Make, plain: Tokenizer
) -> None:
    service = make_service(script=saying(plain, " hi\nUser: more"))
    service.state.tokenizer = plain
    chat = (await post(service.app, CHAT, {"messages": HELLO, "max_tokens": 40})).json()["choices"][0]
    assert (chat["message"]["content"], chat["finish_reason"]) == (" hi", "stop")
    body: dict[str, Any] = {"input": "ab", "max_output_tokens": 40}
    response = (await post(service.app, "/v1/responses", body)).json()
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == " hi"
    for more in ({"messages": HELLO, "ignore_eos": True}, {"prompt": "ab"}):
        path = CHAT if "messages" in more else "/v1/completions"
        whole = (await post(service.app, path, {**more, "max_tokens": 40})).json()["choices"][0]
        assert whole["finish_reason"] == "length"
        assert "\nUser: more" in (whole["text"] if "text" in whole else whole["message"]["content"])


@pytest.mark.anyio
async def test_a_call_at_the_end_of_a_turn_is_what_ended_it(make_service: Make) -> None:
    template = ChatTemplate(HERMES.replace("<|user|>", "[user]"), {})
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), template, is_own=False)
    assert tokenizer.turn_end.strings == ("[user]",)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    service = make_service(script=saying(tokenizer, call + "\n[user]"))
    service.state.tokenizer = tokenizer
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": HELLO, "tools": tools, "max_tokens": 100}
    (choice,) = (await post(service.app, CHAT, body)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    cut = (await post(service.app, CHAT, {**body, "stop": ["[us"]})).json()["choices"][0]
    assert cut["finish_reason"] == "stop"


@pytest.mark.anyio
async def test_a_turn_may_end_by_a_token(make_service: Make) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", {})
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), template, is_own=False)
    (end,) = tokenizer.turn_end.tokens
    service = make_service()
    service.state.tokenizer = tokenizer
    for body, tokens in (({}, (5, end)), ({"ignore_eos": True}, (5,))):
        await post(service.app, CHAT, {"messages": HELLO, "max_tokens": 2, "stop_token_ids": [5], **body})
        assert service.engine.streams[-1].params.stop_token_ids == tokens


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), ("/v1/responses", "input")])
async def test_a_refusal_names_both_ways_out(make_service: Make, path: str, field: str) -> None:
    service = make_service()
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level())
    reply = await post(service.app, path, {field: HELLO})
    assert (reply.status, reply.error["code"]) == (400, "no_chat_template")
    for way in ("/v1/completions", "--chat-template", "chatml"):
        assert way in reply.error["message"]
