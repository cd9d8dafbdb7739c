"""Tool calls as each family of models writes them: every split of a text gives the same calls and text."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from quire.engine.errors import FieldError
from quire.service.text.history import as_wanted
from quire.service.text.pieces import AnswerParser, Piece
from quire.service.text.structured import lark_grammar
from quire.service.text.template import ChatTemplate
from quire.service.text.tokenizer import Tokenizer
from quire.service.text.tools import formats
from quire.service.text.tools.formats import CallFormat, format_of
from quire.service.text.tools.held_answers import CallsOrDocument, OnlyCalls
from quire.service.text.tools.lark import json_of
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.regions import RegionFormat
from quire.service.text.tools.typed_values import allowed_texts, text_expression
from quire.service.text.tools.use import parser_of
from tests.service import tiny_tokenizers
from tests.service.grammar_texts import accepts
from tests.service.splits import splits
from tests.service.test_tool_parser import Message, collect, cut
from tests.service.test_tools import random_text

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 9}, "name": {"type": "string"}},
    "required": ["answer"],
}
DOCUMENT = json_of(ANSWER | {"additionalProperties": False})
FUNCTIONS = [Function(name="f", parameters=PARAMETERS), Function(name="g")]
ARGUMENTS = {"city": "Bär [x]", "days": 3}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)

BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ALL, NONE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
XML = (
    "<tool_call>\n<function=f>\n<parameter=city>\nBär [x]\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
PAIRS = (
    "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Bär [x]</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
OTHER = "<tool_call>\n<function=h>\n</function></tool_call>"
INVOKED = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Bär [x]</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>'
)
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ARGUMENT = "<|tool_call_argument_begin|>"
LISTED = f'[{{"name": "f", "arguments": {JSON}}}, {{"name": "g", "arguments": {{}}}}]'
PYTHON = '[f(city="Bär [x]", days=3), g()]'
F, FG = [("f", ARGUMENTS)], [("f", ARGUMENTS), ("g", {})]

# format, text, the text that is no call, and the calls
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("QWEN_CODER", f"I look.\n{XML}\n", "I look.", F),
    ("QWEN_CODER", f"{XML}\n<tool_call><function=g></function></tool_call>", "", FG),
    ("QWEN_CODER", OTHER, OTHER, []),
    ("QWEN_CODER", "a <tool_call>", "a <tool_call>", []),
    ("GLM", f"Well. {PAIRS}", "Well.", F),
    ("GLM", "<tool_call>g</tool_call>", "", [("g", {})]),
    ("GLM", "<tool_call>g or h</tool_call>", "<tool_call>g or h</tool_call>", []),
    ("MINIMAX", f"Well.\n{INVOKED}", "Well.", FG),
    ("MINIMAX", "<minimax:tool_call> or so", "<minimax:tool_call> or so", []),
    ("MINIMAX_M1", f'<tool_calls>\n{{"name": "f", "arguments": {JSON}}}\n</tool_calls>', "", F),
    ("HUNYUAN", f"<tool_calls>{LISTED}</tool_calls>", "", FG),
    (
        "KIMI",
        f"Hm.{SECTION}<|tool_call_begin|>functions.f:0{ARGUMENT}{JSON}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.g:1{ARGUMENT}{{}}<|tool_call_end|>{SECTION_END}",
        "Hm.",
        FG,
    ),
    ("KIMI", "<|tool_call_begin|>functions.h:0", "<|tool_call_begin|>functions.h:0", []),
    ("LLAMA_4", PYTHON, "", FG),
    ("LLAMA_4", f"<|python_start|>{PYTHON}<|python_end|>", "", FG),
    ("LLAMA_4", f'{{"name": "f", "parameters": {JSON}}}', "", F),
    ("LLAMA_4", "[1, 2] and 'more", "[1, 2] and 'more", []),
    ("LLAMA_4", "[it's", "[it's", []),
    ("LLAMA_4", "Plain.", "Plain.", []),
    ("MISTRAL_LIST", f"[TOOL_CALLS]{LISTED}", "", FG),
    ("MISTRAL_LIST", "see [TOOL_CALLS] there", "see [TOOL_CALLS] there", []),
    ("MISTRAL", f"Ok[TOOL_CALLS]f[ARGS]{JSON}[TOOL_CALLS]g[ARGS]{{}}", "Ok", FG),
    ("MISTRAL", f"[TOOL_CALLS]f{JSON}", "", F),
    ("MISTRAL", f"[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{JSON}", "", F),
    ("DEEPSEEK_FENCED", f"{ALL}{BEGIN}function{SEPARATOR}f\n```json\n{JSON}\n```{END}{NONE}", "", F),
    ("DEEPSEEK", f"Hm.{ALL}{BEGIN}f{SEPARATOR}{JSON}{END}{BEGIN}g{SEPARATOR}{{}}{END}{NONE}", "Hm.", FG),
    ("GEMMA", "<start_function_call>call:f{city:<escape>Bär [x]<escape>,days:3}<end_function_call>", "", F),
    ("GEMMA_4", 'So <|tool_call>call:f{city:<|"|>Bär [x]<|"|>,days:3}<tool_call|>', "So", F),
    ("GEMMA_PYTHON", f"```tool_code\n{PYTHON}\n```", "", FG),
    ("GEMMA_PYTHON", "```tool_code\nimport os\n```", "```tool_code\nimport os\n```", []),
    ("GRANITE", f"<|tool_call|>{LISTED}", "", FG),
    ("GRANITE", f"<tool_call>{LISTED}", "", FG),
    ("GRANITE_20B", f'<function_call> {{"name": "f", "arguments": {JSON}}}', "", F),
    ("PHI", f"<|tool_call|>{LISTED}<|/tool_call|>", "", FG),
    ("PHI_FUNCTOOLS", f"functools{LISTED}", "", FG),
    ("HARMONY_CALLS", f"<|channel|>commentary to=functions.f json<|message|>{JSON}<|call|>", "", F),
]


def parse(form: CallFormat, pieces: list[str], *, parallel: bool = True) -> Message:
    parser = parser_of(form, FUNCTIONS, parallel=parallel)
    found: list[Piece] = [piece for text in pieces for piece in parser.push(text)]
    return collect(found + parser.finish())


@pytest.mark.parametrize(("name", "text", "said", "calls"), CASES, ids=lambda each: str(each)[:30])
def test_calls_and_text_for_every_split(
    name: str, text: str, said: str, calls: list[tuple[str, Any]]
) -> None:
    form = getattr(formats, name)
    whole = parse(form, [text])
    assert (whole[0], [(called, json.loads(given)) for called, given in whole[1]]) == (said, calls)
    for pieces in (
        splits(text) if len(text) < 90 else [list(text), *([text[:at], text[at:]] for at in range(len(text)))]
    ):
        assert parse(form, pieces) == whole, pieces
    if len(calls) > 1:
        assert [name for name, _ in parse(form, [text], parallel=False)[1]] == ["f"]


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name, text, _, calls in CASES if calls and "days" in text],
    ids=lambda each: str(each)[:30],
)
def test_arguments_are_told_of_as_they_come(name: str, text: str) -> None:
    """What there is of them is always a beginning of the JSON that they come to."""
    form = getattr(formats, name)
    parser = parser_of(form, FUNCTIONS, parallel=True)
    ((called, begun),) = collect(parser.push(text[: text.index("days") + 3]))[1]
    assert called == "f" and begun.startswith('{"city": "Bär [x]"')
    assert parse(form, [text])[1][0][1].startswith(begun)


@pytest.mark.parametrize(
    ("name", "text", "begun"),
    [
        ("QWEN_CODER", XML[: XML.index("[x]")], '{"city": "Bär '),
        ("QWEN_CODER", XML.replace("<parameter=days>", "<days>"), '{"city": "Bär [x]"'),
        ("GLM", PAIRS[: PAIRS.index("days")], '{"city": "Bär [x]"'),
        ("LLAMA_4", '[f(city="Bär [x]", days=open("x"))]', '{"city": "Bär [x]"'),
        ("MISTRAL", '[TOOL_CALLS]f[ARGS]{"city": "B', '{"city": "B'),
        ("GEMMA", "<start_function_call>call:f{city:<escape>Bär [x]<escape>,3}", '{"city": "Bär [x]"'),
    ],
)
def test_a_call_that_breaks_off_is_no_whole_json(name: str, text: str, begun: str) -> None:
    """So nobody runs it with the arguments that there are."""
    said, ((called, arguments),) = parse(getattr(formats, name), [text])
    assert (called, arguments) == ("f", begun)
    assert not said or name == "LLAMA_4"


NOISE = [
    "",
    "x",
    " ",
    "\n",
    '"',
    "'",
    "\\",
    ",",
    "=",
    ":",
    "<",
    "</",
    ">",
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    "é🙂",
    "`",
]
EDIT = st.tuples(st.floats(0, 1), st.integers(0, 9), st.sampled_from([*NOISE, " " * 1100]))


@given(
    st.sampled_from(CASES),
    st.lists(EDIT, max_size=3),
    st.lists(st.floats(0, 1), max_size=20),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_how_a_text_is_cut_changes_nothing(
    case: tuple[str, str, str, list[tuple[str, Any]]],
    edits: list[tuple[float, int, str]],
    places: list[float],
    parallel: bool,
) -> None:
    """Also of calls that are nearly right."""
    form, text = getattr(formats, case[0]), case[1]
    for place, length, noise in edits:
        at = int(place * len(text))
        text = text[:at] + noise + text[at + length :]
    whole = parse(form, [text], parallel=parallel)
    assert parse(form, cut(text, places), parallel=parallel) == whole
    assert parse(form, list(text), parallel=parallel) == whole
    if isinstance(form, RegionFormat) and not form.around and not whole[1]:
        assert whole[0] == text, "without a call it is all text"


def test_values_are_of_the_parameters_types() -> None:
    kinds: dict[str, Any] = {
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "s": {"type": "string"},
    }
    kinds["m"] = {"type": ["string", "null"]}
    functions = [Function(name="f", parameters={"type": "object", "properties": kinds})]
    given = {"n": "1.5", "b": "True", "l": "[1, null]", "s": "[1]", "m": "7", "other": "x y"}
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in given.items())
    parser = parser_of(formats.QWEN_CODER, functions, parallel=True)
    pieces = parser.push(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")
    ((_, arguments),) = collect(pieces)[1]
    expected = {"n": 1.5, "b": True, "l": [1, None], "s": "[1]", "m": "7", "other": "x y"}
    assert json.loads(arguments) == expected


def test_texts_without_quotes_are_held_to_what_can_be_enforced() -> None:
    assert text_expression({"type": "string", "format": "path"}) == text_expression({"type": "string"})
    with pytest.raises(FieldError, match="format of a text"):
        text_expression({"type": "string", "format": "date"})


@pytest.mark.parametrize("name", ["QWEN_CODER", "GEMMA", "LLAMA_4"])
def test_parameters_that_are_no_schema_are_refused_by_their_keyword(name: str) -> None:
    """Where calls are written by them."""
    form: CallFormat = getattr(formats, name)
    text = {"a": {"type": "string"}}
    for wrong, words in (
        ({"properties": 3}, "properties of 'f' must be an object"),
        ({"properties": text, "required": 3}, "required of 'f' must be an array"),
    ):
        function = Function(name="f", parameters={"type": "object", **wrong})
        with pytest.raises(FieldError, match=words):
            form.must_call([function], lambda text: None, parallel=True)
    with pytest.raises(FieldError, match="enum of a text must be an array"):
        allowed_texts({"type": "string", "enum": 3})


FORMS = [name for name in vars(formats) if isinstance(getattr(formats, name), CallFormat)]


def tokenizer_of(form: CallFormat) -> Tokenizer:
    backend = tiny_tokenizers.byte_level()
    if form in (formats.HARMONY_CALLS, formats.GEMMA, formats.GEMMA_4):  # whose markers are always tokens
        backend.add_special_tokens([AddedToken(each, special=True) for each in form.markers])
    return Tokenizer(backend, ChatTemplate("", {}))


@pytest.mark.parametrize("name", FORMS)
def test_what_must_be_called_is_and_its_arguments_fit(name: str) -> None:
    form: CallFormat = getattr(formats, name)
    tokenizer, rng, most = tokenizer_of(form), random.Random(3), 0
    strict = [Function(name=each.name, parameters=each.parameters, strict=True) for each in FUNCTIONS]
    schemas = {function.name: function.schema for function in FUNCTIONS}
    for parallel in (True, False):
        rules = lark_grammar(form.must_call(FUNCTIONS, tokenizer.added_token, parallel=parallel))
        for _ in range(4):
            text = random_text(tokenizer, rules, rng, limit=400)
            if text is None:
                continue
            said, calls = parse(form, [text])
            assert said == "" and calls and (parallel or len(calls) == 1), text
            beside = form.call_or_document(
                strict, tokenizer.added_token, parallel=parallel, document=DOCUMENT
            )
            assert accepts(tokenizer, beside, text)
            most = max(most, len(calls))
            for called, arguments in calls:
                jsonschema.validate(json.loads(arguments), schemas[called])
    assert most


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_must_be_made_and_is_cut_leaves_no_text(name: str) -> None:
    form: CallFormat = getattr(formats, name)
    tokenizer = tokenizer_of(form)
    rules = lark_grammar(form.must_call(FUNCTIONS, tokenizer.added_token, parallel=False))
    text = next(filter(None, (random_text(tokenizer, rules, random.Random(seed)) for seed in range(9))))
    for end in range(len(text)):
        parsers: list[AnswerParser] = [OnlyCalls(parser_of(form, FUNCTIONS, parallel=False))]
        if form.written_begins:
            own = parser_of(form, FUNCTIONS, parallel=False)
            parsers.append(CallsOrDocument(own, form.written_begins))
        for parser in parsers:
            said, calls = collect(
                [piece for each in text[:end] for piece in parser.push(each)] + parser.finish()
            )
            assert (said, calls) == ("", parse(form, [text[:end]])[1]), text[:end]


@pytest.mark.parametrize("name", FORMS)
def test_a_document_may_come_instead_of_calls(name: str) -> None:
    form: CallFormat = getattr(formats, name)
    tokenizer = tokenizer_of(form)
    rules = form.call_or_document(FUNCTIONS, tokenizer.added_token, parallel=True, document=DOCUMENT)
    head = "<|channel|>final<|message|>" if form is formats.HARMONY_CALLS else ""
    for text in ('{"answer": "x"}', '{"answer":"x", "name": "f"}'):
        assert accepts(tokenizer, rules, head + text)
    for wrong in ("", "Just text.", head + '{"answer": 3}', head + '{"answer": "x"} x'):
        assert not accepts(tokenizer, rules, wrong)
    if not isinstance(form, RegionFormat) or not form.written_begins:
        return
    called = (
        next(text for case, text, _, calls in CASES if case == name and calls) if name != "HERMES" else ""
    )
    text = json.dumps({"answer": f"{called}{form.written_begins[0]}<tool_call>"}, ensure_ascii=False)
    for pieces in (list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        parser = CallsOrDocument(parser_of(form, FUNCTIONS, parallel=True), form.written_begins)
        found = [piece for each in pieces for piece in parser.push(each)]
        assert collect(found + parser.finish()) == (text, [])


@pytest.mark.parametrize("name", [name for name in FORMS if name != "HARMONY_CALLS"])
def test_any_text_may_be_said_beside_strict_calls(name: str) -> None:
    form: CallFormat = getattr(formats, name)
    tokenizer = tokenizer_of(form)
    strict = [Function(name="f", parameters=PARAMETERS, strict=True), Function(name="g")]
    rules = form.may_call(strict, tokenizer.added_token, parallel=True)
    assert accepts(tokenizer, rules, "Just text.\n{}") and accepts(tokenizer, rules, "")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("HERMES", "<tool_call>{{ tools }}"),
        ("QWEN_CODER", "<tool_call><function={{ tools }}"),
        ("GLM", "<tool_call>{{ tools }}<arg_key>"),
        ("LLAMA", "ipython {{ tools }}"),
        ("LLAMA_4", "<|header_start|>{{ tools }} ipython"),
        ("MISTRAL_LIST", "[TOOL_CALLS]{{ tools }}"),
        ("MISTRAL", "[TOOL_CALLS]{{ tools }}[ARGS]"),
        ("DEEPSEEK", "{{ tools }}<｜tool▁call▁begin｜>"),
        ("DEEPSEEK_FENCED", "{{ tools }}<｜tool▁call▁begin｜>```json"),
        ("GEMMA", "{{ tools }}<start_function_call>"),
        ("GEMMA_4", "{{ tools }}<|tool_call>call:"),
        ("GEMMA_PYTHON", "{{ tools }}```tool_code"),
        ("GRANITE", "{{ tools }}<|tool_call|>"),
        ("PHI", "{{ tools }}<|tool_call|><|/tool_call|>"),
        ("PHI", "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}"),
        ("PHI_FUNCTOOLS", "{{ tools }}functools[{"),
        ("GRANITE_20B", "<|function_call_library|>{{ tools }}"),
        ("KIMI", "{{ tools }}<|tool_call_begin|>{{ tool_call.id }}<|tool_call_argument_begin|>"),
        ("MINIMAX", "{{ tools }}<minimax:tool_call><invoke name="),
        ("MINIMAX_M1", "{{ tools }}<tool_calls>\n{"),
        ("HUNYUAN", "{{ tools }}<tool_calls>[{"),
        ("HARMONY_CALLS", "{{ tools }}<|channel|>commentary to=functions.f"),
    ],
)
def test_templates_tell_their_format(name: str, source: str) -> None:
    assert format_of(source) is getattr(formats, name)
    assert format_of(source.replace("tools", "")) is None


def test_history_as_templates_want_it() -> None:
    call = {"id": "call_123", "type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}
    messages = [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "call_123"},
    ]
    assert as_wanted("{{ messages }}", messages) == messages
    assert as_wanted("{{ message.thinking }}", messages)[0]["thinking"] == "hm"
    called, answered = as_wanted("[TOOL_CALLS]", messages)
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert len(answered["tool_call_id"]) == 9 and answered["tool_call_id"].isalnum()
    (text, _) = as_wanted("{{ 'x' + tool['function']['arguments'] + 'y' }}", messages)
    assert text["tool_calls"][0]["function"]["arguments"] == '{"a": "ü"}'
    assert as_wanted("{{ tool_call.arguments | tojson }}", messages) == messages
    called, answered = as_wanted("<|tool_call_argument_begin|>", messages)  # Kimi's
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"] == "functions.f:0"
    tools = [{"type": "function", "function": {"name": "f"}}]
    system, *rest = as_wanted("{{ message['tools'] }}", messages, tools)  # Phi-4-mini's
    assert system == {"role": "system", "content": "", "tools": '[{"name": "f"}]'} and rest == messages
