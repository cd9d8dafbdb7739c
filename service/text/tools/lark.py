"""Pieces of grammars of tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from quire.service.text.structured import json_rule
from quire.service.text.tools.protocol import Function

TokenOf = Callable[[str], int | None]
"""The token that a vocabulary has for a whole text, which a grammar names as such."""

THINKING = ("<think>", "</think>")
ANY_TEXT = r"TEXT: /(.|\n)*/"


def literal(text: str, token_of: TokenOf) -> str:
    """Return a marker, as a grammar writes it: a token, or a text."""
    token = token_of(text) if text else None
    return json.dumps(text) if token is None else f"<[{token}]>"


def schema_of(function: Function, *, forced: bool) -> dict[str, Any]:
    """Return the schema that a grammar holds its arguments to: any object, unless it is strict or forced."""
    return function.schema if forced or function.strict else {"type": "object"}


def json_of(schema: dict[str, Any]) -> str:
    return json_rule(schema)


def in_order(pairs: list[tuple[str, bool]], comma: str) -> str:
    """Return the rules that must be there, and then any of the others, with commas between them."""
    first = [pair for pair, required in pairs if required]
    rest = [pair for pair, required in pairs if not required]
    between = f' "{comma}" '
    if first:
        return between.join(first) + "".join(f" ({between.lstrip()}{pair})?" for pair in rest)
    # the first of those that are there has no comma
    tails = [
        pair + "".join(f" ({between.lstrip()}{later})?" for later in rest[at + 1 :])
        for at, pair in enumerate(rest)
    ]
    return "(" + " | ".join(tails) + ")?" if tails else ""


def free_text(
    begin: str, item: str, token_of: TokenOf, *, repeated: bool, others: tuple[str, ...] = ()
) -> list[str]:
    """Return the rules of any text in which `item` follows each `begin`: once, unless it is repeated.

    Tokens of their own are no text: those of thinking, and `others`, may stand in it.
    """
    marks = [literal(each, token_of) for each in (*THINKING, *others) if token_of(each) is not None]
    marked = f" (({' | '.join(marks)}) TEXT)*" if marks else ""
    if token_of(begin) is not None:
        trigger = f"trigger: text {literal(begin, token_of)}"
    else:  # a text goes on until the marker is whole
        trigger = f"trigger[lazy]: TEXT {json.dumps(begin)}"
    start = f"start: (trigger {item})* text" if repeated else f"start: trigger {item} | text"
    return [start, trigger, f"text: TEXT{marked}", ANY_TEXT]
