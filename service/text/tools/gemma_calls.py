"""Gemma's calls: call:name{city:<escape>Zürich<escape>,days:3}, where texts stand between quoting tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.service.text.pieces import CallStart
from quire.service.text.tools.incoming import Functions, Incoming, NoCall, Steps, Told, named
from quire.service.text.tools.lark import TokenOf, in_order, json_of, literal
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.regions import Reader, Writer
from quire.service.text.tools.typed_values import (
    allowed_texts,
    is_text,
    property_names,
    required_names,
    standing_alone,
    text_expression,
)

_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)")


def reader(quote: str) -> Reader:
    """For a model that quotes texts with this token."""

    def read(incoming: Incoming, functions: Functions) -> Steps[None]:
        yield from incoming.space()
        yield from incoming.need("call:")
        name = yield from incoming.word()
        named(functions, name)
        yield from incoming.space()
        yield from incoming.need("{")
        yield CallStart(name)
        told, more = Told(), True
        while more:
            yield from incoming.space()
            if (yield from incoming.has("}")):
                break
            yield told.key((yield from _key(incoming)))
            yield from incoming.space()
            if (yield from incoming.has(quote)):
                yield from incoming.tell_text(quote)
                yield from incoming.space()
            else:
                text = yield from incoming.value((quote, '"'), ",}")
                yield told.value(_decoded(text, quote))
            more = yield from incoming.has(",")
            if not more:
                yield from incoming.need("}")
        yield told.end()

    return read


def _key(incoming: Incoming) -> Steps[str]:
    quoted = yield from incoming.has('"')
    key = yield from (incoming.upto('"') if quoted else incoming.word())
    yield from incoming.space()
    yield from incoming.need(":")
    return key


def _decoded(text: str, quote: str) -> Any:
    """Raises NoCall."""
    try:
        return msgspec.json.decode(_as_json(text, quote))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise NoCall from None


def _as_json(text: str, quote: str) -> str:
    """With texts in quotes, and keys too."""
    parts = text.split(quote)
    for at in range(0, len(parts), 2):  # what stands between texts
        parts[at] = _KEY.sub(r'\1"\2"\3', parts[at])
    for at in range(1, len(parts), 2):
        parts[at] = json.dumps(parts[at], ensure_ascii=False)
    return "".join(parts)


def writer(quote: str, end: str) -> Writer:
    def write(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
        quoting, close = literal(quote, token_of), literal(end, token_of)
        rules = ["region: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
        for at, function in enumerate(functions):
            names = property_names(function)
            required = required_names(function) if forced or function.strict else ()
            pairs = []
            for number, name in enumerate(names):
                value = _value(standing_alone(function, name), quoting)
                rules.append(f"pair_{at}_{number}: {json.dumps(f'{name}:')} {value}")
                pairs.append((f"pair_{at}_{number}", name in required))
            body = in_order(pairs, ",")
            head = json.dumps(f"call:{function.name}{{")
            rules.append(f'call_{at}: {head} {body} "}}" {close}')
        return rules

    return write


def _value(schema: dict[str, Any], quoting: str) -> str:
    if not is_text(schema):
        return json_of(schema)
    if texts := allowed_texts(schema):
        return f"{quoting} ({' | '.join(map(json.dumps, texts))}) {quoting}"
    return f"{quoting} {text_expression(schema)} {quoting}"
