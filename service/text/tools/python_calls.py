"""Calls as Python: [f(city="Zürich", days=3), g()]. They are parsed, and never run."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from quire.service.text.pieces import CallStart
from quire.service.text.tools.incoming import Functions, Incoming, NoCall, Steps, Told, named
from quire.service.text.tools.json_calls import MORE, read_items
from quire.service.text.tools.lark import TokenOf, in_order, json_of
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.typed_values import property_names, required_names, standing_alone

_QUOTES = ('"""', "'''", '"', "'")  # longer ones first
_NAMES = {"true": True, "false": False, "null": None}


def read_python(incoming: Incoming, functions: Functions) -> Steps[None]:
    """Read calls with keywords, in a list or line by line; or JSON, as the same models write it, too."""
    yield from incoming.space()
    wrapped = yield from incoming.has("print([")
    listed = wrapped or (yield from incoming.has("["))
    yield from incoming.space()
    if (yield from incoming.next()) == "{":
        yield from read_items(incoming, functions, listed=listed)
        return
    more = True
    while more and (yield from incoming.next()) != "]":
        yield from _call(incoming, functions)
        if listed:
            yield from incoming.space()
            more = yield from incoming.has(",")
            yield from incoming.space()
        else:
            yield from incoming.space(" \t\r\n;,")
            more = (yield from incoming.next()).isidentifier()
    if listed:
        yield from incoming.need("])" if wrapped else "]")


def _call(incoming: Incoming, functions: Functions) -> Steps[None]:
    """Tell of a call once its first argument comes, or its end."""
    name = yield from incoming.word()
    named(functions, name)
    yield from incoming.need("(")
    yield from incoming.space()
    told, open_ = Told(), not (yield from incoming.has(")"))
    key = (yield from _keyword(incoming)) if open_ else ""
    yield CallStart(name)
    while open_:
        value = _parsed((yield from incoming.value(_QUOTES, ",)")))
        yield told.key(key)
        yield told.value(value)
        yield from incoming.has(",")
        yield from incoming.space()
        open_ = not (yield from incoming.has(")"))
        if open_:
            key = yield from _keyword(incoming)
    yield told.end()


def _keyword(incoming: Incoming) -> Steps[str]:
    key = yield from incoming.word()
    yield from incoming.space()
    yield from incoming.need("=")
    if not key.isidentifier():
        raise NoCall
    return key


def _parsed(text: str) -> Any:
    """Raises NoCall."""
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
        json.dumps(value, allow_nan=False)  # 1e999 is no JSON, nor is an integer that Python does not print
        return value
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoCall from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key}
    raise ValueError("no value")


def write_list_of_calls(
    functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool
) -> list[str]:
    return [f'region: "[" call {MORE if several else ""} "]"', *_write(functions, forced)]


def write_fenced_calls(
    functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool
) -> list[str]:
    return [f'region: "\\n[" call {MORE if several else ""} "]\\n```"', *_write(functions, forced)]


def _write(functions: Sequence[Function], forced: bool) -> list[str]:
    """Return the rules of calls, with keywords in the schema's order.

    JSON's values are Python's, but for three names that are read, too.
    """
    rules = ["call: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
    for at, function in enumerate(functions):
        fits = forced or bool(function.strict)
        names = property_names(function)
        required = required_names(function) if fits else ()
        pairs = []
        for number, name in enumerate(names):
            one = standing_alone(function, name) if fits else {}
            rules.append(f"pair_{at}_{number}: {json.dumps(f'{name}=')} {json_of(one)}")
            pairs.append((f"pair_{at}_{number}", name in required))
        body = in_order(pairs, ", ")
        rules.append(f'call_{at}: {json.dumps(f"{function.name}(")} {body} ")"')
    return rules
