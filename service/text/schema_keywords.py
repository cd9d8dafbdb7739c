"""Which keywords of JSON Schema have schemas in them, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

OF_NAMES = frozenset(  # whose values have schemas by names of the client's own
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
OF_VALUES = frozenset(("enum", "const", "default", "examples"))  # that have no schemas


def within(schema: dict[str, Any], *, named: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a schema and all that are in it; `named`: it has schemas by their names, and is none itself."""
    if not named:
        yield schema
    for key, value in schema.items():
        if not named and key in OF_VALUES:
            continue
        if isinstance(value, dict):
            yield from within(value, named=not named and key in OF_NAMES)
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, dict):
                    yield from within(each)


def rewritten(
    schema: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]], *, named: bool = False
) -> dict[str, Any]:
    """Return a schema changed, and all that are in it before; `named` as of `within`."""

    def inner(key: str, value: Any) -> Any:
        if not named and key in OF_VALUES:
            return value
        if isinstance(value, dict):
            return rewritten(value, change, named=not named and key in OF_NAMES)
        if isinstance(value, list):
            return [rewritten(each, change) if isinstance(each, dict) else each for each in value]
        return value

    found = {key: inner(key, value) for key, value in schema.items()}
    return found if named else change(found)
