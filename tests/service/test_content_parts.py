"""Messages of text for chat templates that read their content in parts, as those of models that see do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.service.text.named_templates import read_template
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.asgi import post
from tests.service.conftest import Service
from tests.service.test_chat_templates import CHAT, PROMPTS, SAID, SPECIAL
from tests.service.tool_templates import HERMES, LLAMA

LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SMOL = (
    "{% for message in messages %}{{ message.role }}: {% set parts = message.content %}"
    "{% for part in parts %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
)
MACRO = (
    "{% macro said(parts) %}{% for part in parts if part.type == 'text' %}{{ part.text }}{% endfor %}"
    "{% endmacro %}{% for message in messages %}{{ message.role }}: {{ said(message.content) }} {% endfor %}"
)
MIXED = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ '<' + message.content | trim + '>' }}"
    "{% elif message.role == 'assistant' %}{{ message.content }}{% else %}{{ message.content[0].text }}"
    "{% for part in message.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)
EITHER = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}!{% endfor %}{% endif %}{% endfor %}"
)


def rendered(source: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=True)


def test_text_comes_in_parts_where_a_template_reads_nothing_else() -> None:
    assert rendered(LLAVA, SAID) == "SYSTEM: s USER: ab ASSISTANT: c USER: d ASSISTANT:"
    for source in (SMOL, MACRO):
        assert rendered(source, SAID[:2]) == "system: s user: ab "


def test_text_is_written_out_where_a_template_reads_that_of_some_roles() -> None:
    assert rendered(MIXED, SAID[:3]) == "<s>ab(ab)c"


def test_parts_stay_as_they_are_and_no_text_is_no_part() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]
    assert rendered(LLAVA, parts) == rendered(LLAVA, [{"role": "user", "content": "ab"}])
    for nothing in ("", []):
        assert rendered(LLAVA, [{"role": "user", "content": nothing}]) == "USER: ASSISTANT:"


@pytest.mark.parametrize("source", [EITHER, HERMES, LLAMA])
def test_text_stays_text_where_a_template_reads_that(source: str) -> None:
    assert not ChatTemplate(source, SPECIAL).takes_parts_alone


def test_named_templates_read_text() -> None:
    for name in PROMPTS:
        assert not ChatTemplate(read_template(name), SPECIAL).takes_parts_alone


@pytest.mark.anyio
@pytest.mark.parametrize("continues", [False, True])
async def test_a_server_shows_such_a_template_what_was_said(
    make_service: Callable[..., Service], continues: bool
) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(LLAVA, {}), is_own=False)
    prompts: list[str] = []

    def said(prompt: list[int], params: Any, index: int) -> list[int]:
        prompts.append(tokenizer.decode(prompt, skip_special_tokens=False))
        return prompt[: params.max_tokens]

    service = make_service(script=said)
    service.state.tokenizer = tokenizer
    body = {"messages": SAID[1:3] if continues else SAID[1:2], "max_tokens": 2}
    if continues:
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    answer = await post(service.app, CHAT, body)
    assert answer.status == 200, answer.text
    assert prompts == ["USER: ab ASSISTANT: c" if continues else "USER: ab ASSISTANT:"]
