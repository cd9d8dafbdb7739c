"""Arguments that are written without quotes: what they are is for the function's parameters to say."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.service.text.tools.protocol import Function

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_KINDS = {bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"}


def property_schema(function: Function, name: str) -> dict[str, Any]:
    schema = function.schema.get("properties", {})
    found = schema.get(name) if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def is_text(schema: dict[str, Any]) -> bool:
    """Whether values are strings, and nothing else."""
    return schema.get("type") == "string"


def typed(text: str, schema: dict[str, Any]) -> Any:
    """Return a value as its schema has it; a text that is no such value stays a text."""
    if is_text(schema):
        return text
    try:
        value = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _WORDS.get(text.strip().lower(), text)
    kinds = schema.get("type")
    if isinstance(kinds, list) and "string" in kinds and _KINDS.get(type(value)) not in kinds:
        return text
    return value
