"""Calls told from text: the same whatever the pieces, and nothing of a marker in the text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.service.text.pieces import CallArguments, CallStart, Piece
from quire.service.text.tools.formats import HERMES, LLAMA, format_of
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.regions import RegionFormat
from quire.service.text.tools.use import parser_of
from tests.service import tool_templates
from tests.service.conftest import CHAT_TEMPLATE

FUNCTIONS = [Function(name="f"), Function(name="get_weather")]
WEATHER = '{"city": "Zürich \\"}{\\" 🙂", "days": [1, {"a": "]"}]}'
Message = tuple[str, list[tuple[str, str]]]


def collect(pieces: list[Piece]) -> Message:
    text, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        match piece:
            case str():
                text += piece
            case CallStart(name):
                calls.append((name, ""))
            case CallArguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return text, calls


def parse(form: RegionFormat, pieces: list[str], *, parallel: bool = True) -> Message:
    parser = parser_of(form, FUNCTIONS, parallel=parallel)
    found = [piece for text in pieces for piece in parser.push(text)]
    return collect(found + parser.finish())


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


CASES: list[tuple[RegionFormat, str, Message]] = [
    (HERMES, "", ("", [])),
    (HERMES, " plain text \n", (" plain text \n", [])),
    (HERMES, hermes("f", "{}"), ("", [("f", "{}")])),
    (HERMES, hermes("get_weather", WEATHER), ("", [("get_weather", WEATHER)])),
    (
        HERMES,
        f"I look.\n\n{hermes('f', '{}')}\n{hermes('f', WEATHER)}\n",
        ("I look.", [("f", "{}"), ("f", WEATHER)]),
    ),
    (HERMES, f"a {hermes('f', '{}')} b ", ("a b", [("f", "{}")])),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', ("", [("f", '{"x":1}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", [("f", '{"x":1}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "cut', ("", [("f", '{"x": "cut')])),
    (HERMES, hermes("unknown", "{}"), (hermes("unknown", "{}"), [])),
    (HERMES, "<tool_call>\nno JSON</tool_call> x", ("<tool_call>\nno JSON</tool_call> x", [])),
    (HERMES, '<tool_call> {"name": "f"} </tool_call>', ('<tool_call> {"name": "f"} </tool_call>', [])),
    (HERMES, f"say <tool_call> {hermes('f', '{}')}", ("say <tool_call>", [("f", "{}")])),
    (HERMES, "a <tool_cal", ("a <tool_cal", [])),
    (HERMES, 'x <tool_call>{"name"', ('x <tool_call>{"name"', [])),
    (HERMES, llama("f", "{}"), (llama("f", "{}"), [])),
    (LLAMA, "", ("", [])),
    (LLAMA, " plain {text} ", (" plain {text} ", [])),
    (LLAMA, llama("get_weather", WEATHER), ("", [("get_weather", WEATHER)])),
    (LLAMA, f"<|python_tag|>{llama('f', '{}')}", ("", [("f", "{}")])),
    (LLAMA, f"\n {llama('f', '{}')}; {llama('f', WEATHER)}", ("", [("f", "{}"), ("f", WEATHER)])),
    (LLAMA, f"{llama('f', '{}')}, {llama('f', '{}')}", (f", {llama('f', '{}')}", [("f", "{}")])),
    (LLAMA, f"{llama('f', '{}')};", ("", [("f", "{}")])),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    (LLAMA, f"Sure: {llama('f', '{}')}", (f"Sure: {llama('f', '{}')}", [])),
    (LLAMA, llama("unknown", "{}"), (llama("unknown", "{}"), [])),
    (LLAMA, '{"name": "f", "age": 3} ', ('{"name": "f", "age": 3} ', [])),
    (LLAMA, '{"na', ('{"na', [])),
    (LLAMA, '<|python_tag|>print("x")', ('<|python_tag|>print("x")', [])),
    (LLAMA, f"{llama('f', '{}')} and more", (" and more", [("f", "{}")])),
    (LLAMA, '{"name": "f", "parameters": {"x": [1', ("", [("f", '{"x": [1')])),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_and_text(form: RegionFormat, text: str, expected: Message) -> None:
    assert parse(form, [text]) == expected
    assert parse(form, list(text)) == expected


SNIPPETS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool_",
            "</",
            "\n",
            "  ",
            "hello",
            "{",
            "}",
            ";",
            "<|python_tag|>",
        ),
        *(
            '{"name": "f", ',
            '"arguments": ',
            '"parameters": ',
            '{"x": "}"}',
            '{"name": "g"}',
            "🙂",
            '"',
            "\\",
        ),
        *(hermes("f", "{}"), hermes("get_weather", WEATHER), llama("f", WEATHER), '{"type": "function", '),
        " " * 1100,
    ]
)


def cut(text: str, places: list[float]) -> list[str]:
    ends = sorted({0, len(text), *(int(place * len(text)) for place in places)})
    return [text[a:b] for a, b in pairwise(ends)]


@given(
    st.sampled_from([HERMES, LLAMA]),
    st.lists(SNIPPETS, max_size=12).map("".join),
    st.lists(st.floats(0, 1), max_size=30),
    st.booleans(),
)
@example(HERMES, "<tool_call>{" + " " * 1100 + '"name": "f", "arguments": {}}</tool_call>', [0.5, 0.9], True)
@settings(deadline=None)
def test_the_pieces_do_not_matter(form: RegionFormat, text: str, places: list[float], parallel: bool) -> None:
    whole = parse(form, [text], parallel=parallel)
    assert parse(form, cut(text, places), parallel=parallel) == whole
    assert parse(form, list(text), parallel=parallel) == whole
    if not whole[1]:
        assert whole[0] == text, "without a call it is all text"
    assert parallel or len(whole[1]) <= 1


TEXT = st.text(alphabet='a"\\{}[]<>/: é🙂\n', max_size=6)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from([HERMES, LLAMA]),
    st.lists(st.dictionaries(TEXT, JSON, max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0, 1), max_size=9),
)
@settings(max_examples=40, deadline=None)
def test_calls_come_back_as_they_were_written(
    form: RegionFormat, arguments: list[dict[str, Any]], places: list[float]
) -> None:
    write = hermes if form is HERMES else llama
    texts = [json.dumps(each, ensure_ascii=False) for each in arguments]
    text = form.between.join(write("f", each) for each in texts)
    assert parse(form, cut(text, places)) == ("", [("f", each) for each in texts])


def test_a_call_is_told_of_before_it_is_whole() -> None:
    parser = parser_of(HERMES, FUNCTIONS, parallel=True)
    assert parser.push('Let me see. <tool_call>{"name": "f", "argu') == ["Let me see."]
    assert parser.push('ments": {"a') == [CallStart("f"), CallArguments('{"a')]
    assert parser.push('": 1}}') == [CallArguments('": 1}')]


def test_only_one_call_when_only_one_may_be_made() -> None:
    parser = parser_of(LLAMA, FUNCTIONS, parallel=False)
    pieces = parser.push(f"{llama('f', '{}')}; {llama('f', '{}')}")
    assert collect(pieces) == ("", [("f", "{}")]) and parser.done


def test_templates_tell_their_format() -> None:
    assert format_of(tool_templates.HERMES) is HERMES
    assert format_of(tool_templates.LLAMA) is LLAMA
    assert format_of(CHAT_TEMPLATE) is None
    assert format_of("{% for tool in tools %}{{ tool }}{% endfor %}") is None
