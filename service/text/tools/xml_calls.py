"""Calls in XML-like tags: Qwen3-Coder's and GLM's. Texts stand in them as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from quire.service.text.tools.lark import TokenOf, json_of, literal
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.regions import Call, Functions
from quire.service.text.tools.typed_values import (
    allowed_texts,
    is_text,
    property_schema,
    standing_alone,
    text_expression,
    typed,
)

_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>\s*", re.DOTALL)
_KEYED = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # that may be tokens


class _Tags(NamedTuple):
    """The texts around a call's parts. In `before`, {} is a function's or a parameter's name."""

    call: str
    before: str
    after: str
    end: str


_QWEN = _Tags("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n")
_GLM = _Tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "")


def read_qwen(region: str, functions: Functions) -> list[Call] | None:
    """<function=name> and <parameter=name> with the value, a line end around it."""
    found = _FUNCTION.fullmatch(region.strip().removesuffix("</function>"))
    if found is None:
        return None
    name, body = found.groups()
    return _read(name, body, _PARAMETER, functions, lines=True)


def read_glm(region: str, functions: Functions) -> list[Call] | None:
    """The name, and then pairs of <arg_key> and <arg_value>."""
    at = region.find("<arg_key>")
    if at >= 0 and "</arg_value>" not in region:
        return None
    name, body = (region, "") if at < 0 else (region[:at], region[at:])
    return _read(name.strip(), body, _KEYED, functions, lines=False)


def _read(
    name: str, body: str, pattern: re.Pattern[str], functions: Functions, *, lines: bool
) -> list[Call] | None:
    function = functions.get(name)
    if function is None:
        return None
    arguments, at = {}, 0
    while found := pattern.match(body, at):
        key, value = found.groups()
        if lines:
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = typed(value, property_schema(function, key.strip()))
        at = found.end()
    if body[at:].strip():
        return None
    return [Call(name, json.dumps(arguments, ensure_ascii=False))]


def write_qwen(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    return _write(functions, _QWEN, literal("</tool_call>", token_of), forced)


def write_glm(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    return _write(functions, _GLM, literal("</tool_call>", token_of), forced)


def _write(functions: Sequence[Function], tags: _Tags, close: str, forced: bool) -> list[str]:
    """Parameters in the order of the schema; of calls that need not fit, any value of each."""
    rules = ["region: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
    for at, function in enumerate(functions):
        schema = function.schema
        names = list(schema.get("properties", {}))
        fits = forced or bool(function.strict)
        required = schema.get("required", ()) if fits else ()
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
