"""Templates that take all time and memory are refused in words, and nothing else notices."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from quire.service.errors import ApiError, TemplateError
from quire.service.text.template import ChatTemplate
from quire.service.text.template_renderer import TemplateRenderer
from quire.service.text.tokenizer import Tokenizer
from tests.service import tiny_tokenizers
from tests.service.asgi import post
from tests.service.conftest import CHAT_TEMPLATE, Service

pytestmark = pytest.mark.anyio
CHAT, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/responses", "/tokenize"
MESSAGES = [{"role": "user", "content": "hello"}]
_MULTIPLY = "{% set a = a * a %}" * 40
BOMBS = {
    "format": "{{ '%1500000000d' % 1 }}",
    "format of what is said": "{{ ('%1500000000d' ~ messages[0].content) % 1 }}",
    "center": "{{ messages[0].content|center(1500000000) }}",
    "constant center": "{{ 'a'|center(1500000000) }}",
    "doubling": "{% set a = 'a' %}" + "{% set a = a ~ a %}" * 40 + "{{ a }}",
    "big numbers": "{% set a = 3 %}" + _MULTIPLY + "{{ a }}",
}
HARMLESS = ChatTemplate(CHAT_TEMPLATE, {})


@pytest.fixture
async def make_renderer() -> AsyncIterator[Callable[..., TemplateRenderer]]:
    made: list[TemplateRenderer] = []

    def make(**settings: Any) -> TemplateRenderer:
        made.append(TemplateRenderer(4 << 20, **settings))
        return made[-1]

    yield make
    for renderer in made:
        await renderer.close()


async def rendered(
    renderer: TemplateRenderer, template: ChatTemplate, content: str = "hello", **given: Any
) -> str:
    return await renderer.render(
        template,
        [{"role": "user", "content": content}],
        **{"add_generation_prompt": True, "arguments": {}, "tools": None, "param": "messages"} | given,
    )


@pytest.mark.parametrize("bomb", BOMBS)
async def test_bombs_go_off_elsewhere(make_renderer: Callable[..., TemplateRenderer], bomb: str) -> None:
    """A refusal within the template's time; the loop goes on, and this process stays as large as it was."""
    renderer = make_renderer()
    template = ChatTemplate(BOMBS[bomb], {})
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work = time.process_time()
    with pytest.raises(TemplateError, match=r"took longer than 2 s|too much memory|Exceeds the limit"):
        await rendered(renderer, template)
    assert time.process_time() - work < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest < 100 << 10  # KiB
    assert (await rendered(renderer, HARMLESS)).startswith("<|user|>hello")


async def test_a_bomb_is_a_400_and_the_next_chat_an_answer(service: Service) -> None:
    source = "{% if messages[0].content == 'boom' %}" + BOMBS["big numbers"] + "{% endif %}" + CHAT_TEMPLATE
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(source, {}))
    service.state.renderer = TemplateRenderer(4 << 20, seconds=0.3)
    boom = [{"role": "user", "content": "boom"}]
    asked: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        (CHAT, "messages", {"messages": boom}, {"messages": MESSAGES, "max_tokens": 1}),
        (RESPONSES, "input", {"input": "boom"}, {"input": "hello", "max_output_tokens": 16}),
        (TOKENIZE, "messages", {"messages": boom}, {"messages": MESSAGES}),
    ]
    for path, param, bomb, harmless in asked:
        reply = await post(service.app, path, bomb)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert "chat template" in reply.error["message"]
        assert (await post(service.app, path, harmless)).status == 200


async def test_prompts_are_those_of_the_template(make_renderer: Callable[..., TemplateRenderer]) -> None:
    source = "{{ bos_token }}{{ messages|tojson }}{{ tools|tojson }}"
    source += "{{ enable_thinking }}{{ add_generation_prompt }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    content = "ä🙂\x00\n<b>" + "x" * 3_000_000
    given = {
        "arguments": {"enable_thinking": False},
        "tools": [{"n": 10**30, "f": [1e308, -0.0, None, True]}],
        "add_generation_prompt": False,
    }
    text = template.render([{"role": "user", "content": content}], **given)
    assert await rendered(make_renderer(), template, content, **given) == text


async def test_a_template_that_compiles_only_almost(make_renderer: Callable[..., TemplateRenderer]) -> None:
    template = ChatTemplate("{{ 1|nothing }}", {})
    with pytest.raises(ValueError, match="does not compile: No filter named 'nothing'"):
        await make_renderer().start(template)
    with pytest.raises(TemplateError, match="does not compile"):
        await rendered(make_renderer(), template)


async def test_a_template_that_says_too_much(make_renderer: Callable[..., TemplateRenderer]) -> None:
    with pytest.raises(ApiError) as refused:
        await rendered(make_renderer(), ChatTemplate("{{ 'ä' * 3000000 }}", {}))
    assert refused.value.status == 413 and "6000000 bytes, more than 4194304" in refused.value.message
    with pytest.raises(TemplateError) as failed:
        await rendered(make_renderer(), ChatTemplate("{{ raise_exception('a' * 1000000) }}", {}))
    assert len(str(failed.value)) <= 1000


async def test_a_lost_process_is_replaced(make_renderer: Callable[..., TemplateRenderer]) -> None:
    renderer = make_renderer()
    await renderer.start(HARMLESS)
    assert renderer._workers is not None
    for process in renderer._workers._started:
        process.kill()
    assert await rendered(renderer, HARMLESS)


async def test_a_process_that_is_lost_again_fails_its_conversation_only(
    make_renderer: Callable[..., TemplateRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.service.text.worker_pool.TRIES", 0)
    with pytest.raises(ApiError) as lost:
        await rendered(make_renderer(), HARMLESS)
    assert (lost.value.status, lost.value.code) == (503, "worker_lost")


async def test_only_so_much_waits(
    make_renderer: Callable[..., TemplateRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.service.text.template_renderer.MAX_WAITING_BYTES", 4000)
    renderer = make_renderer()
    asked = [rendered(renderer, HARMLESS, "x" * 1000) for _ in range(5)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [getattr(result, "status", 200) for result in results] == [200, 200, 200, 429, 429]
    assert len(await rendered(renderer, HARMLESS, "x" * 9000)) > 9000, "one that comes alone"
