"""Calls as JSON objects: {"name": …, "arguments": {…}}, told by their heads, or read whole."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, NamedTuple

import msgspec

MAX_HEAD = 1024  # characters of a call before its arguments


class JsonDepth:
    """Where a JSON object ends."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.closed = False

    def read(self, text: str) -> int:
        """Return how many characters of `text` belong to it."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return at + 1
        return len(text)


class Head(NamedTuple):
    name: str
    length: int  # up to the brace that begins the arguments


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def match_head(text: str, arguments: str) -> Head | bool | None:
    """Return the beginning of a call, up to its arguments; None: not yet all of it; False: something else.

    {"type": "function", "name": "...", "parameters": { — where the type may be left out.
    """
    at = 0
    literals = ["{", '"name"', ":", _STRING, ",", f'"{arguments}"', ":", "{"]
    if re.match(r'\s*\{\s*"t', text):
        literals[1:1] = ['"type"', ":", '"function"', ","]
    name = ""
    for literal in literals:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        if isinstance(literal, str):
            if not text.startswith(literal, at):
                return None if literal.startswith(text[at:]) else False
            at += len(literal)
            continue
        found = _STRING.match(text, at)
        if found is None:
            return None if text[at : at + 1] in ("", '"') else False
        try:
            name = msgspec.json.decode(found.group(), type=str)
        except msgspec.DecodeError:
            return False
        at = found.end()
    return Head(name, at - 1)


_PLAIN = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("$schema", "$id", "title", "description", "default", "examples"),
}


def may_begin_as_call(schema: dict[str, Any]) -> bool:
    """Return whether objects of a schema may begin as a call does, with a name and parameters.

    They are written in the schema's order, and properties that it does not have come last.
    """
    if set(schema) - _PLAIN:
        return True
    names, required = schema.get("properties"), schema.get("required")
    if not isinstance(names, dict):
        return True
    if schema.get("additionalProperties") is False:
        return "parameters" in names
    comes_first = isinstance(required, list) and any(name in required for name in names)
    return not comes_first or "name" in names or "type" in names


def decode_call(content: str, arguments: str, names: Container[str]) -> tuple[str, str] | None:
    """Return name and arguments of a call that is there as a whole; None if it is none."""
    try:
        call: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        given = call.get(arguments)
        if isinstance(given, str):
            given = msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if call.get("name") not in names or not isinstance(given, dict):
        return None
    return call["name"], msgspec.json.encode(given).decode()
