"""Calls as Python: [f(city="Zürich", days=3), g()]. They are parsed, and never run."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from quire.service.text.tools.json_calls import MORE, read_list
from quire.service.text.tools.lark import TokenOf, json_of
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.regions import Call, Functions
from quire.service.text.tools.typed_values import standing_alone

MAX_CHARS = 64 << 10
_NAMES = {"true": True, "false": False, "null": None}


def read_python(region: str, functions: Functions) -> list[Call] | None:
    """Calls with keywords, in a list or line by line; or JSON, as the same models write it, too."""
    text = region.strip()
    if len(text) > MAX_CHARS:
        return None
    try:
        body = ast.parse(text.removeprefix("print(") if text.startswith("print([") else text).body
        calls = [call for statement in body for call in _calls(statement)]
        return [Call(_name(call.func), json.dumps(_keywords(call), ensure_ascii=False)) for call in calls]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return read_list(region, functions)


def _calls(statement: ast.stmt) -> list[ast.Call]:
    """Raises ValueError if it is something else."""
    if not isinstance(statement, ast.Expr):
        raise ValueError("no expression")
    items = statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
    calls = [item for item in items if isinstance(item, ast.Call)]
    if len(calls) < len(items):
        raise ValueError("no call")
    return calls


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _keywords(call: ast.Call) -> dict[str, Any]:
    if call.args:
        raise ValueError("an argument without its name")
    return {_given(keyword.arg): _value(keyword.value) for keyword in call.keywords}


def _given(name: str | None) -> str:
    if name is None:
        raise ValueError("an argument without its name")
    return name


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
    """JSON's values are Python's, but for three names that are read, too. Keywords in the schema's order."""
    rules = ["call: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
    for at, function in enumerate(functions):
        fits = forced or bool(function.strict)
        schema = function.schema
        names = list(schema.get("properties", {}))
        required = [name for name in names if fits and name in schema.get("required", ())]
        pairs = {}
        for number, name in enumerate(names):
            pairs[name] = f"pair_{at}_{number}"
            one = standing_alone(function, name) if fits else {}
            rules.append(f"{pairs[name]}: {json.dumps(f'{name}=')} {json_of(one)}")
        optional = [name for name in names if name not in required]
        first, rest = [pairs[name] for name in required], [pairs[name] for name in optional]
        body = ' ", " '.join(first) + "".join(f' (", " {pair})?' for pair in rest)
        if not first and rest:  # the first of those that are there has no comma
            tails = [
                pair + "".join(f' (", " {later})?' for later in rest[number + 1 :])
                for number, pair in enumerate(rest)
            ]
            body = "(" + " | ".join(tails) + ")?"
        rules.append(f'call_{at}: {json.dumps(f"{function.name}(")} {body} ")"')
    return rules
