"""Calls in XML-like tags: Qwen3-Coder's, GLM's and MiniMax's. Texts stand in them as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.service.text.pieces import CallArguments, CallStart
from quire.service.text.tools.incoming import Functions, Incoming, NoCall, Steps, Told, named
from quire.service.text.tools.lark import TokenOf, json_of, literal
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.typed_values import (
    allowed_texts,
    is_text,
    property_names,
    property_schema,
    required_names,
    standing_alone,
    text_expression,
    typed,
)

TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # that may be tokens


class _Tags(NamedTuple):
    """The texts around a call's parts. In `before`, {} is a function's or a parameter's name."""

    call: str
    before: str
    after: str
    end: str


_QWEN = _Tags("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n")
_MINIMAX = _Tags('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n")
_GLM = _Tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "")


def read_qwen(incoming: Incoming, functions: Functions) -> Steps[None]:
    """<function=name> and <parameter=name> with the value, a line end around it."""
    yield from incoming.space()
    yield from incoming.need("<function=")
    name = (yield from incoming.upto(">")).strip()
    function, told = named(functions, name), Told()
    yield CallStart(name)
    while True:
        yield from incoming.space()
        if not (yield from incoming.has("<parameter=")):
            break
        key = (yield from incoming.upto(">")).strip()
        yield told.key(key)
        yield from incoming.has("\n")
        yield from _value(incoming, property_schema(function, key), "</parameter>", lines=True)
    if not (yield from incoming.has("</function>")) and not (yield from incoming.comes("</tool_call>")):
        raise NoCall
    yield told.end()


def read_glm(incoming: Incoming, functions: Functions) -> Steps[None]:
    """Read the name, and then pairs of <arg_key> and <arg_value>."""
    yield from incoming.space()
    name = yield from incoming.word()
    function, told = named(functions, name), Told()
    yield from incoming.space()
    more = yield from incoming.has("<arg_key>")
    if more or (yield from incoming.comes("</tool_call>")):
        yield CallStart(name)
    while more:
        key = (yield from incoming.upto("</arg_key>")).strip()
        yield from incoming.space()
        yield from incoming.need("<arg_value>")
        yield told.key(key)
        yield from _value(incoming, property_schema(function, key), "</arg_value>", lines=False)
        yield from incoming.space()
        more = yield from incoming.has("<arg_key>")
    if not (yield from incoming.comes("</tool_call>")):
        raise NoCall
    yield told.end()


def read_minimax(incoming: Incoming, functions: Functions) -> Steps[None]:
    """<invoke name="…"> and <parameter name="…">, one call or several."""
    yield from incoming.space()
    while (yield from incoming.has('<invoke name="')):
        name = yield from incoming.upto('">')
        function, told = named(functions, name), Told()
        yield CallStart(name)
        yield from incoming.space()
        while (yield from incoming.has('<parameter name="')):
            key = yield from incoming.upto('">')
            yield told.key(key)
            yield from _value(incoming, property_schema(function, key), "</parameter>", lines=False)
            yield from incoming.space()
        yield from incoming.need("</invoke>")
        yield told.end()
        yield from incoming.space()


def _value(incoming: Incoming, schema: dict[str, Any], end: str, *, lines: bool) -> Steps[None]:
    """Tell of a text as it comes, and of anything else once it is there."""
    if is_text(schema):
        yield from incoming.tell_text(end, lines=lines)
        return
    text = yield from incoming.upto(end)
    value = typed(text.removesuffix("\n") if lines else text, schema)
    yield CallArguments(json.dumps(value, ensure_ascii=False))


def write_qwen(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    return _write(functions, _QWEN, literal("</tool_call>", token_of), forced)


def write_glm(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    return _write(functions, _GLM, literal("</tool_call>", token_of), forced)


def write_minimax(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    either, *rules = _write(functions, _MINIMAX, '""', forced)
    end = literal("</minimax:tool_call>", token_of)
    region = f'region: "\\n" call{"+" if several else ""} {end}'
    return [region, either.replace("region:", "call:", 1), *rules]


def _write(functions: Sequence[Function], tags: _Tags, close: str, forced: bool) -> list[str]:
    """Parameters in the order of the schema; of calls that need not fit, any value of each."""
    rules = ["region: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
    for at, function in enumerate(functions):
        names = property_names(function)
        fits = forced or bool(function.strict)
        required = required_names(function) if fits else ()
        parts = []
        for number, name in enumerate(names):
            rule = f"value_{at}_{number}"
            one = property_schema(function, name)
            before, after = json.dumps(tags.before.format(name)), json.dumps(tags.after)
            if is_text(one) and fits and (texts := allowed_texts(one)):
                rules.append(f"{rule}: ({' | '.join(map(json.dumps, texts))}) {after}")
            elif is_text(one) or not fits:
                rules.append(f"{rule}[lazy]: {text_expression(one if fits else {})} {after}")
            else:
                rules.append(f"{rule}: {json_of(standing_alone(function, name))} {after}")
            parts.append(f"{before} {rule}" if name in required else f"({before} {rule})?")
        head, end = json.dumps(tags.call.format(function.name)), json.dumps(tags.end)
        rules.append(f"call_{at}: {head} {' '.join(parts)} {end} {close}")
    return rules
