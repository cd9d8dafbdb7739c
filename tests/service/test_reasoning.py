"""Thinking told from the answer: whatever the pieces, whichever the model's way, and by HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from tokenizers import AddedToken

from quire.service.text.pieces import AnswerParser, CallArguments, CallStart, Piece, Thought
from quire.service.text.reasoning.formats import (
    FORMATS,
    REASONING_PARSERS,
    ReasoningFormat,
    reasoning_format_of,
)
from quire.service.text.reasoning.harmony import HarmonyParser
from quire.service.text.reasoning.parser import ThinkingParser
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from quire.service.text.tools.formats import HERMES, KIMI
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.use import parser_of
from tests.service import tiny_tokenizers, tool_templates
from tests.service.asgi import post
from tests.service.conftest import Service
from tests.service.grammar_texts import accepts_grammar
from tests.service.splits import splits
from tests.service.test_tool_parser import hermes
from tests.service.test_tools import make_room

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
Told = tuple[str, str, list[tuple[str, str]]]


def told(pieces: list[Piece]) -> Told:
    """The thinking, the answer and the calls."""
    thinking, answer, calls = "", "", list[tuple[str, str]]()
    for piece in pieces:
        match piece:
            case str():
                answer += piece
            case Thought(text):
                thinking += text
            case CallStart(name):
                calls.append((name, ""))
            case CallArguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return thinking, answer, calls


def hold(make: Callable[[], AnswerParser], text: str, expected: Told) -> None:
    """It is so for every split of the text, and no piece shows part of a marker."""
    for pieces in splits(text):
        parser = make()
        found = [piece for text in pieces for piece in parser.push(text)]
        assert told(found + parser.finish()) == expected, pieces


THINK = FORMATS["qwen3"]
CASES: list[tuple[ReasoningFormat, bool, str, Told]] = [
    (THINK, False, "<think>\nso\n</think>\n\nyes", ("so", "yes", [])),
    (THINK, True, "so\n\nso</think>yes\n", ("so\n\nso", "yes\n", [])),
    (THINK, True, "<think>so</think>", ("so", "", [])),
    (THINK, False, "no <think>x</think>", ("", "no <think>x</think>", [])),
    (THINK, False, "\n <think></think> a", ("", " a", [])),
    (THINK, False, "<thin", ("", "<thin", [])),
    (THINK, True, "cut </thi", ("cut </thi", "", [])),
    (THINK, True, "a < b </think>\n\n\nc </think>", ("a < b ", "c </think>", [])),
    (THINK, False, "", ("", "", [])),
    (FORMATS["deepseek_r1"], False, "so</think>\n\nyes", ("so", "yes", [])),
    (FORMATS["deepseek_r1"], False, "only thoughts\n", ("only thoughts", "", [])),
    (FORMATS["granite"], False, "Here is my thought process: so\nHere is my response: y", (" so", " y", [])),
    (FORMATS["granite"], False, "<think>a</think><response>b\n</response>", ("a", "b", [])),
    (FORMATS["hunyuan"], True, "a\n</think>\n<answer>\nb\nc\n</answer>", ("a", "b\nc", [])),
    (FORMATS["hunyuan"], False, "just b\n", ("", "just b\n", [])),
    (FORMATS["mistral"], False, "[THINK]a[b[/THINK]c[", ("a[b", "c[", [])),
    (FORMATS["seed_oss"], False, "<seed:think>a</seed:think>b", ("a", "b", [])),
]


@pytest.mark.parametrize(("form", "inside", "text", "expected"), CASES)
def test_thinking_and_answer(form: ReasoningFormat, inside: bool, text: str, expected: Told) -> None:
    hold(lambda: ThinkingParser(form, inside=inside), text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"so\n</think>\n\nI look. {hermes('f', '{}')}", ("so", "I look.", [("f", "{}")])),
        (f"so {hermes('f', '{}')} x", ("so ", " x", [("f", "{}")])),  # a call ends thinking
        ("so <tool_c", ("so <tool_c", "", [])),
    ],
)
def test_calls_after_thinking_and_within(text: str, expected: Told) -> None:
    def make() -> AnswerParser:
        tools = parser_of(HERMES, [Function(name="f")], parallel=True)
        return ThinkingParser(THINK, inside=True, tools=tools, calls=HERMES.opening)

    hold(make, text, expected)


def test_a_call_that_ends_thinking_leaves_no_marker_in_it() -> None:
    """What stands around calls ends it, too."""

    def make() -> AnswerParser:
        tools = parser_of(KIMI, [Function(name="f")], parallel=True)
        return ThinkingParser(THINK, inside=True, tools=tools, calls=KIMI.opening)

    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"so <|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    hold(make, text, ("so ", "", [("f", "{}")]))


ANALYSIS = "<|channel|>analysis<|message|>so<|end|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>yes", ("so", "yes", [])),
        (f"{ANALYSIS}<|start|>assistant{ANALYSIS}", ("so\nso", "", [])),
        (
            f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
            '{"a": 1}<|call|>',
            ("so", "", [("f", '{"a": 1}')]),
        ),
        (
            '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a"',
            ("", "", [("f", '{"a"')]),
        ),
        ("<|channel|>commentary<|message|>I look.<|end|>", ("", "I look.", [])),
        ("<|channel|>commentary to=functions.g<|message|>{}<|call|>", ("", "{}", [])),
        ("plain < text", ("", "plain < text", [])),
        ("<|channel|>fin", ("", "", [])),
    ],
)
def test_channels(text: str, expected: Told) -> None:
    hold(lambda: HarmonyParser(frozenset({"f"})), text, expected)


def test_templates_tell_their_way() -> None:
    for name, source in {
        "qwen3": "{% if enable_thinking is false %}<think></think>{% endif %}",
        "deepseek_r1": "<｜Assistant｜>{{ content.split('</think>')[-1] }}",
        "glm": "[gMASK]<sop>{{ '<think></think>' }}",
        "granite": "Respond with 'Here is my thought process:'",
        "gpt_oss": "<|channel|>analysis<|message|>{{ message.thinking }}",
        "hunyuan": "<think>{{ x }}</think><answer>",
        "mistral": "[THINK]{{ x }}[/THINK]",
        "seed_oss": "<seed:think>",
    }.items():
        assert reasoning_format_of(source) is FORMATS[name], name  # type: ignore[index]
    for name, source in {
        "kimi_k2": "<|im_assistant|>assistant<|im_middle|>{{ '<think></think>' }}",
        "minimax": "<beginning_of_sentence>ai name=assistant",
    }.items():
        assert reasoning_format_of(source) is FORMATS[name]  # type: ignore[index]
    assert reasoning_format_of(tool_templates.HERMES) is None
    assert set(REASONING_PARSERS) == {"auto", "none", *FORMATS}


# -- by HTTP ------------------------------------------------------------------------------------------------

OPEN = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|><think>\n"
TOLD = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture
def thinker(make_service: Callable[..., Service]) -> Callable[..., Service]:
    """A model that says `text`; marker: whether its markers are tokens of their own."""

    def make(text: str, template: str = OPEN, *, marker: bool = False, **config: Any) -> Service:
        backend = tiny_tokenizers.byte_level()
        if marker:
            markers = (*THINK.markers, *FORMATS["gpt_oss"].markers)
            backend.add_special_tokens([AddedToken(each, special=True) for each in markers])
        tokenizer = Tokenizer(backend, ChatTemplate(template, {}))
        tokens = tokenizer.encode(text + "<|end|>", add_special_tokens=False)
        service = make_service(script=lambda prompt, params, index: tokens, **config)
        service.state.tokenizer = tokenizer
        make_room(service.engine)
        return service

    return make


def merged(events: list[Any]) -> dict[str, str]:
    """What a client puts together of a stream."""
    message = {"content": "", "reasoning": "", "reasoning_content": ""}
    for event in events:
        if event != "[DONE]":
            for name, text in event["choices"][0]["delta"].items():
                if name in message:
                    message[name] += text or ""
    return message


@pytest.mark.anyio
@pytest.mark.parametrize("marker", [False, True])
async def test_both_names_whole_and_streamed_with_counted_tokens(
    thinker: Callable[..., Service], marker: bool
) -> None:
    service = thinker("It is\nnice.\n</think>\n\nYes.", marker=marker)
    reply = (await post(service.app, CHAT, {"messages": HELLO})).json()
    ChatCompletion.model_validate(reply)
    message, usage = reply["choices"][0]["message"], reply["usage"]
    assert (message["content"], message["reasoning"]) == ("Yes.", "It is\nnice.")
    assert message["reasoning_content"] == message["reasoning"]
    thought = len(service.state.tokenizer.encode("It is\nnice.\n</think>", add_special_tokens=False))  # type: ignore[union-attr]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}
    streamed = await post(service.app, CHAT, {"messages": HELLO, "stream": True})
    assert merged(streamed.events) == {name: message[name] for name in merged([])}
    assert streamed.events[-1] == "[DONE]"


@pytest.mark.anyio
async def test_thinking_that_is_turned_off_and_parsers_that_are(thinker: Callable[..., Service]) -> None:
    text = "<think>so</think>yes"
    for service, body, content in (
        (thinker(text, TOLD), {}, "yes"),
        (thinker(text, TOLD), {"chat_template_kwargs": {"enable_thinking": False}}, text),
        (thinker(text, TOLD), {"reasoning_effort": "none"}, text),
        (thinker(text, TOLD, reasoning_parser="none"), {}, text),
        (thinker(text, tool_templates.HERMES), {}, text),
        (thinker(text, tool_templates.HERMES, reasoning_parser="qwen3"), {}, "yes"),
    ):
        reply = (await post(service.app, CHAT, {"messages": HELLO, **body})).json()
        assert reply["choices"][0]["message"]["content"] == content


@pytest.mark.anyio
async def test_thinking_that_is_not_wanted_is_counted_all_the_same(thinker: Callable[..., Service]) -> None:
    service = thinker("so</think>yes")
    for body in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        reply = (await post(service.app, CHAT, {"messages": HELLO, **body})).json()
        message = reply["choices"][0]["message"]
        assert message["content"] == "yes" and "reasoning" not in message
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    off = thinker("<think>so</think>yes", TOLD)
    reply = (await post(off.app, CHAT, {"messages": HELLO, "reasoning": {"enabled": False}})).json()
    assert reply["choices"][0]["message"]["content"] == "<think>so</think>yes"


@pytest.mark.anyio
async def test_a_length_may_cut_thinking(thinker: Callable[..., Service]) -> None:
    service = thinker("It is nice.</think>Yes.")
    choice = (await post(service.app, CHAT, {"messages": HELLO, "max_tokens": 3})).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert "It is nice.".startswith(choice["message"]["reasoning"])


@pytest.mark.anyio
async def test_thinking_goes_on_and_comes_back(thinker: Callable[..., Service]) -> None:
    service = thinker("more</think>yes", "{% for m in messages %}{{ m.content }}{% endfor %}<think>")
    begun = [*HELLO, {"role": "assistant", "content": "<think>I think "}]
    source = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}{# <think> #}"
    service.state.tokenizer = Tokenizer(tiny_tokenizers.byte_level(), ChatTemplate(source, {}))
    reply = (await post(service.app, CHAT, {"messages": begun, "continue_final_message": True})).json()
    message = reply["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("more", "yes")
    await post(service.app, CHAT, {"messages": [*HELLO, message, *HELLO]})
    prompt = service.state.tokenizer.decode(service.engine.streams[-1].prompt, skip_special_tokens=False)
    assert prompt == "hellomoreyeshello"


NUMBER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@pytest.mark.anyio
@pytest.mark.parametrize("marker", [False, True])
@pytest.mark.parametrize("template", [OPEN, TOLD])
async def test_grammars_constrain_what_follows_thinking(
    thinker: Callable[..., Service], template: str, marker: bool
) -> None:
    service = thinker("x", template, marker=marker)
    tokenizer = service.state.tokenizer
    assert tokenizer is not None
    assert (await post(service.app, CHAT, {"messages": HELLO, "response_format": NUMBER})).status == 200
    grammar = service.engine.streams[-1].params.grammar
    begin = "" if template is OPEN else "<think>"
    for text in (f"{begin}any {{ thing\n</think>\n\n17", f"{begin}</think>3"):
        assert accepts_grammar(tokenizer, grammar, text), text
    for text in (f"{begin}any</think>\n\nthing", f"{begin}any"):
        assert not accepts_grammar(tokenizer, grammar, text), text
    assert accepts_grammar(tokenizer, grammar, "17") is (template is TOLD), "it may answer at once"


@pytest.mark.anyio
@pytest.mark.parametrize("budget", [0, 3])
async def test_a_budget_ends_thinking(thinker: Callable[..., Service], budget: int) -> None:
    service = thinker("x", marker=True)
    tokenizer = service.state.tokenizer
    assert tokenizer is not None
    for more, answer in (({}, "any text <|user|>"), ({"response_format": NUMBER}, "17")):
        body = {"messages": HELLO, "thinking_token_budget": budget, **more}
        reply = await post(service.app, CHAT, body)
        assert reply.status == 200, reply.body
        grammar = service.engine.streams[-1].params.grammar
        assert accepts_grammar(tokenizer, grammar, "#" * budget + "</think>" + answer)
        assert not accepts_grammar(tokenizer, grammar, "#" * (budget + 1) + "</think>" + answer)


@pytest.mark.anyio
async def test_budgets_that_cannot_be_kept(thinker: Callable[..., Service]) -> None:
    body = {"messages": HELLO, "thinking_token_budget": 3}
    reply = await post(thinker("x").app, CHAT, body)
    assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")
    reply = await post(thinker("x", marker=True).app, CHAT, body | {"bad_words": ["x"]})
    assert (reply.status, reply.error["param"]) == (400, "thinking_token_budget")
    reply = await post(thinker("x", tool_templates.HERMES).app, CHAT, body)
    assert reply.headers["x-quire-ignored"] == "thinking_token_budget"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning": {"enabled": False}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning": {"max_tokens": 3}, "thinking_token_budget": 0}, "thinking_token_budget"),
        ({"reasoning": {"enabled": False, "effort": "high"}}, "reasoning"),
    ],
)
async def test_two_wishes_that_differ_are_refused(
    thinker: Callable[..., Service], given: dict[str, Any], param: str
) -> None:
    reply = await post(thinker("x", marker=True).app, CHAT, {"messages": HELLO, **given})
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.anyio
async def test_two_wishes_that_agree_are_one(thinker: Callable[..., Service]) -> None:
    given = {"reasoning": {"enabled": False, "max_tokens": 3}, "reasoning_effort": "none"}
    reply = await post(thinker("x", marker=True).app, CHAT, {"messages": HELLO, **given})
    assert reply.status == 200, reply.body


@pytest.mark.anyio
async def test_forced_calls_follow_thinking(thinker: Callable[..., Service]) -> None:
    service = thinker("x", tool_templates.HERMES + "<think>\n")
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
    assert (await post(service.app, CHAT, body)).status == 200
    grammar = service.engine.streams[-1].params.grammar
    assert accepts_grammar(service.state.tokenizer, grammar, f"so</think>\n\n{hermes('f', '{}')}")  # type: ignore[arg-type]
    assert not accepts_grammar(service.state.tokenizer, grammar, "so</think>\n\nno")  # type: ignore[arg-type]


HARMONY = "{{ tools }}<|channel|>analysis to=functions.{% for m in messages %}{{ m.content }}{% endfor %}"
CALL_HEAD = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("template", "budget", "before", "call", "head"),
    [
        (tool_templates.HERMES + "<think>\n", None, "so</think>\n\n", hermes("f", "{}"), ""),
        (tool_templates.HERMES + "<think>\n", 2, "so</think>\n\n", hermes("f", "{}"), ""),
        (HARMONY, None, "", f"{CALL_HEAD}{{}}", "<|channel|>final<|message|>"),  # <|end|> is an eos here
    ],
)
async def test_calls_or_a_document_follow_thinking(
    thinker: Callable[..., Service], template: str, budget: int | None, before: str, call: str, head: str
) -> None:
    service = thinker("x", template, marker=True)
    tokenizer = service.state.tokenizer
    assert tokenizer is not None
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HELLO, "tools": tools, "response_format": NUMBER, "thinking_token_budget": budget}
    reply = await post(service.app, CHAT, body)
    assert reply.status == 200, reply.body
    grammar = service.engine.streams[-1].params.grammar
    for answer, allowed in ((call, True), (f"{head}17", True), (f"{head}no", False), ("", False)):
        assert accepts_grammar(tokenizer, grammar, before + answer) is allowed, answer


@pytest.mark.anyio
async def test_a_budget_of_thinking_leaves_harmonys_calls(thinker: Callable[..., Service]) -> None:
    service = thinker("x", HARMONY, marker=True)
    tokenizer = service.state.tokenizer
    assert tokenizer is not None
    tools = [{"type": "function", "function": {"name": "f"}}]
    earlier = "to=functions.f<|channel|>commentary json<|message|>{}"  # as the template shows earlier ones
    for more, may_call in (
        ({}, False),
        ({"tools": tools}, True),
        ({"tools": tools, "tool_choice": "none"}, False),
    ):
        body = {"messages": HELLO, "thinking_token_budget": 3, **more}
        assert (await post(service.app, CHAT, body)).status == 200
        grammar = service.engine.streams[-1].params.grammar
        assert accepts_grammar(tokenizer, grammar, "<|channel|>final<|message|>any")
        for call in (f"{CALL_HEAD}{{}}", f" {earlier}"):
            assert accepts_grammar(tokenizer, grammar, call) is may_call, call
        assert not accepts_grammar(tokenizer, grammar, "<|channel|>analysis<|message|>####")


@pytest.mark.anyio
async def test_a_document_after_thinking_is_content(thinker: Callable[..., Service]) -> None:
    said = json.dumps({"answer": hermes("f", "{}")})
    service = thinker(f"so</think>\n\n{said}", tool_templates.HERMES + "<think>\n")
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HELLO, "tools": tools, "response_format": {"type": "json_object"}}
    message = (await post(service.app, CHAT, body)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("so", said) and "tool_calls" not in message
    streamed = merged((await post(service.app, CHAT, body | {"stream": True})).events)
    assert (streamed["reasoning"], streamed["content"]) == ("so", said)


@pytest.mark.anyio
async def test_a_response_has_log_probabilities_of_its_answer_alone(thinker: Callable[..., Service]) -> None:
    """Whole and streamed, however much was thought before."""
    service = thinker("It is nice.\n</think>Yes.", marker=True)
    body = {"input": "hello", "top_logprobs": 1}
    whole = (await post(service.app, "/v1/responses", body)).json()
    (part,) = whole["output"][1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == [*"Yes.", "<|end|>"]
    streamed = await post(service.app, "/v1/responses", body | {"stream": True})
    last = json.loads(streamed.body.decode().rstrip().rsplit("data: ", 1)[1])
    assert last["response"]["output"][1]["content"] == [part]


@pytest.mark.anyio
async def test_responses_tell_thinking_as_an_item(thinker: Callable[..., Service]) -> None:
    service = thinker("It is nice.\n</think>\n\nYes.")
    reply = (await post(service.app, "/v1/responses", {"input": "hello"})).json()
    thought, message = reply["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "It is nice."}]
    assert message["content"][0]["text"] == "Yes."
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    streamed = await post(service.app, "/v1/responses", {"input": "hello", "stream": True})
    events = [
        json.loads(line[6:]) for line in streamed.body.decode().split("\n") if line.startswith("data: ")
    ]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "It is nice."
    kinds = [
        event["type"].removeprefix("response.") for event in events if not event["type"].endswith("delta")
    ]
    assert kinds[2:7] == [
        "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
