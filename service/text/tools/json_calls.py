"""Calls with arguments as JSON: lists of them, as Granite and Phi write them, Mistral's, and DeepSeek's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.service.text.tools.lark import TokenOf, json_of, literal, schema_of
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.regions import Call, Functions

_MISTRAL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
MORE = '(", " call)*'
SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK = re.compile(
    rf"\s*(?:function\s*{SEPARATOR}\s*)?([\w.-]+)\s*(?:{SEPARATOR}\s*)?(?:\n?```json\s*)?(\{{.*\}})\s*(?:```)?\s*",
    re.DOTALL,
)


def as_object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def read_list(region: str, functions: Functions) -> list[Call] | None:
    """[{"name": …, "arguments": {…}}, …], or one of them; Llama calls them parameters."""
    try:
        items = msgspec.json.decode(region.strip().lstrip(";, "), type=list[dict[str, Any]] | dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    calls = []
    for item in items if isinstance(items, list) else [items]:
        arguments = item.get("arguments", item.get("parameters"))
        if isinstance(arguments, str):
            arguments = as_object(arguments)
        if not isinstance(item.get("name"), str) or not isinstance(arguments, dict):
            return None
        calls.append(Call(item["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls


def write_list(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    rules = [f'region: "[" call {MORE if several else ""} "]"', _either(functions)]
    for at, function in enumerate(functions):
        head = json.dumps(f'{{"name": "{function.name}", "arguments": ')
        rules.append(f'call_{at}: {head} {json_of(schema_of(function, forced=forced))} "}}"')
    return rules


def read_mistral(region: str, functions: Functions) -> list[Call] | None:
    """A list, or name[ARGS]{…}."""
    found = _MISTRAL.fullmatch(region)
    if found is None:
        return read_list(region, functions)
    arguments = found.group(2).strip()
    return None if as_object(arguments) is None else [Call(found.group(1), arguments)]


def write_mistral(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    separator = literal("[ARGS]", token_of)
    rules = [_either(functions).replace("call:", "region:", 1)]
    for at, function in enumerate(functions):
        schema = json_of(schema_of(function, forced=forced))
        rules.append(f"call_{at}: {json.dumps(function.name)} {separator} {schema}")
    return rules


def read_deepseek(region: str, functions: Functions) -> list[Call] | None:
    """function<｜tool▁sep｜>name, and then JSON in a fence; later models: name<｜tool▁sep｜>{…}."""
    found = _DEEPSEEK.fullmatch(region)
    if found is None or as_object(found.group(2)) is None:
        return None
    return [Call(found.group(1), found.group(2))]


def write_deepseek(
    functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool
) -> list[str]:
    return _deepseek_rules(functions, token_of, forced, "{name} {separator} {json}")


def write_fenced_deepseek(
    functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool
) -> list[str]:
    fenced = '"function" {separator} {name} "\\n```json\\n" {json} "\\n```"'
    return _deepseek_rules(functions, token_of, forced, fenced)


def _deepseek_rules(functions: Sequence[Function], token_of: TokenOf, forced: bool, form: str) -> list[str]:
    end = literal("<｜tool▁call▁end｜>", token_of)
    rules = [_either(functions).replace("call:", "region:", 1)]
    for at, function in enumerate(functions):
        parts = {
            "{name}": json.dumps(function.name),
            "{separator}": literal(SEPARATOR, token_of),
            "{json}": json_of(schema_of(function, forced=forced)),
        }
        body = " ".join(parts.get(part, part) for part in form.split(" "))
        rules.append(f"call_{at}: {body} {end}")
    return rules


def _either(functions: Sequence[Function]) -> str:
    return "call: " + " | ".join(f"call_{at}" for at in range(len(functions)))
