"""Tools of one's own among those of other kinds, which cannot run here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from quire.engine.errors import FieldError

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAMED = re.compile(r"(unknown|missing required) field `([^`]*)`")
_CODES = {"unknown": "unknown_field", "missing required": "missing_field"}
_PATH = re.compile(r" - at `\$\.([^`]*)`$")


def own_tools(given: Sequence[dict[str, Any]], types: tuple[str | None, ...], kind: type[T]) -> list[T]:
    """Return those whose `type` is one of `types`, as `kind`. Raises FieldError for what is wrong in one."""
    return [_read(tool, f"tools[{at}]", kind) for at, tool in enumerate(given) if _is_own(tool, types)]


def left_out(given: Sequence[dict[str, Any]], types: tuple[str | None, ...]) -> Iterator[str]:
    """Name the others."""
    for at, tool in enumerate(given):
        if not _is_own(tool, types):
            yield tool["type"] if _NAME.fullmatch(tool["type"]) else f"tools[{at}]"


def _is_own(tool: dict[str, Any], types: tuple[str | None, ...]) -> bool:
    """What is of no type that could be one is wrong, rather than another's."""
    return not isinstance(tool.get("type"), str) or tool["type"] in types


def _read(tool: dict[str, Any], name: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(tool, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        named = _NAMED.search(message)
        parts = [name, *_PATH.findall(message), *([] if named is None else [named.group(2)])]
        code = "invalid_value" if named is None else _CODES[named.group(1)]
        field = ".".join(parts)
        raise FieldError(field, f"{field}: {_PATH.sub('', message)}", code) from None
