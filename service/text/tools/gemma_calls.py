"""Gemma's calls: call:name{city:<escape>Zürich<escape>,days:3}, where texts stand between quoting tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.service.text.tools.lark import TokenOf, json_of, literal
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.regions import Call, Functions, Reader, Writer
from quire.service.text.tools.typed_values import allowed_texts, is_text, standing_alone, text_expression

_HEAD = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)")


def reader(quote: str) -> Reader:
    """For a model that quotes texts with this token."""

    def read(region: str, functions: Functions) -> list[Call] | None:
        found = _HEAD.fullmatch(region)
        if found is None:
            return None
        try:
            arguments = msgspec.json.decode(_as_json(found.group(2), quote), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return [Call(found.group(1), json.dumps(arguments, ensure_ascii=False))]

    return read


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
            names = list(function.schema.get("properties", {}))
            required = function.schema.get("required", ()) if forced or function.strict else ()
            pairs = []
            for number, name in enumerate(names):
                value = _value(standing_alone(function, name), quoting)
                rules.append(f"pair_{at}_{number}: {json.dumps(f'{name}:')} {value}")
                pairs.append((f"pair_{at}_{number}", name in required))
            body = _joined(pairs)
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


def _joined(pairs: list[tuple[str, bool]]) -> str:
    """Those that must be there, and then any of the others, with commas between them."""
    first = [pair for pair, required in pairs if required]
    rest = [pair for pair, required in pairs if not required]
    if first:
        return ' "," '.join(first) + "".join(f' ("," {pair})?' for pair in rest)
    tails = [pair + "".join(f' ("," {later})?' for later in rest[at + 1 :]) for at, pair in enumerate(rest)]
    return "(" + " | ".join(tails) + ")?" if tails else ""
