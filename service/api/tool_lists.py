"""Tools of one's own among those of other kinds, which cannot run here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from quire.engine.errors import FieldError
from quire.service.http.tidying import Own

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAMED = re.compile(r"(unknown|missing required) field `([^`]*)`")
_CODES = {"unknown": "unknown_field", "missing required": "missing_field"}
_PATH = re.compile(r" - at `\$\.([^`]*)`$")


def own_tools(given: Sequence[dict[str, Any]], own: Own[T]) -> list[T]:
    """Return one's own. Raises FieldError for what is wrong in one."""
    return [_read(tool, f"tools[{at}]", own.kind) for at, tool in enumerate(given) if own.has(tool)]


def left_out(given: Sequence[dict[str, Any]], own: Own[T]) -> Iterator[str]:
    """Name the others."""
    for at, tool in enumerate(given):
        if not own.has(tool):
            yield tool["type"] if _NAME.fullmatch(tool["type"]) else f"tools[{at}]"


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
