"""Arguments that are written without quotes: what they are is for the function's parameters to say."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from quire.engine.errors import FieldError
from quire.service.text.structured import without_unknown_formats
from quire.service.text.tools.protocol import Function

T = TypeVar("T")

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_KINDS = {bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"}
_KNOWN = {
    *("type", "title", "description", "default", "examples", "enum", "const", "minLength", "maxLength"),
}


def property_names(function: Function) -> list[str]:
    """Return the names of the parameters. Raises FieldError."""
    return list(_part(function, "properties", {}, "an object"))


def required_names(function: Function) -> list[Any]:
    """Return the names of those that must be there. Raises FieldError."""
    return list(_part(function, "required", [], "an array"))


def _part(function: Function, keyword: str, default: T, wanted: str) -> T:
    given: Any = function.schema.get(keyword, default)
    if not isinstance(given, type(default)):
        raise FieldError("tools", f"tools: {keyword} of {function.name!r} must be {wanted}, got {given!r}")
    return given


def property_schema(function: Function, name: str) -> dict[str, Any]:
    schema = function.schema.get("properties", {})
    found = schema.get(name) if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def standing_alone(function: Function, name: str) -> dict[str, Any]:
    """Return a property's schema with the definitions that it may refer to."""
    whole = function.schema
    definitions: dict[str, Any] = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return {**definitions, **property_schema(function, name)}


def is_text(schema: dict[str, Any]) -> bool:
    """Return whether values are strings, and nothing else."""
    return schema.get("type") == "string"


def text_expression(schema: dict[str, Any]) -> str:
    """Return the texts that a schema of texts allows, as an expression. Raises FieldError.

    Where texts stand without quotes a grammar has its own words for them.
    """
    beyond = sorted(set(without_unknown_formats(schema)) - _KNOWN - {"$defs", "definitions"})
    if beyond:
        raise FieldError(
            "tools", f"tools: {beyond[0]} of a text cannot be enforced in the way this model writes calls"
        )
    if "minLength" in schema or "maxLength" in schema:
        return rf"/(.|\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"
    return r"/(.|\n)*/"


def allowed_texts(schema: dict[str, Any]) -> list[str]:
    """Return the only texts that it may be; none: it may be others. Raises FieldError."""
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(allowed, list):
        raise FieldError("tools", f"tools: enum of a text must be an array, got {allowed!r}")
    return [str(each) for each in allowed]


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
