"""The strings that a field may have, where they are few: msgspec says only which it may not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

_PLACE = re.compile(r" - at `\$\.?(.*?)`$")
_STEPS = re.compile(r"([^.\[\]]+)|\[[^\]]*\]")  # a field's name, or an index

_described = cache(inspect.type_info)


def allowed(kind: Any, message: str) -> str:
    """Return the words behind msgspec's about a value of type `kind`; none unless the strings are few."""
    if not message.startswith("Invalid"):
        return ""
    place = _PLACE.search(message)
    found = alternatives(kind, place.group(1) if place else "")
    return f"; strings allowed here: {', '.join(map(repr, found))}" if found else ""


def alternatives(kind: Any, path: str) -> list[str]:
    """Return those at `path` (`messages[0].role`) of a value of type `kind`; none if any may be there."""
    places = [_described(kind)]
    for step in _STEPS.finditer(path):
        places = [inner for place in places for inner in _inside(place, step.group(1))]
    literals = (each for place in places for each in members(place) if isinstance(each, inspect.LiteralType))
    return sorted({str(value) for literal in literals for value in literal.values})


def members(place: inspect.Type) -> Iterator[inspect.Type]:
    """Return what a type may be: the parts of a union, without notes on them."""
    if isinstance(place, inspect.Metadata):
        yield from members(place.type)
    elif isinstance(place, inspect.UnionType):
        for each in place.types:
            yield from members(each)
    else:
        yield place


def _inside(place: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """Return what field `name`, or None for any item, of such a value may be."""
    for member in members(place):
        if isinstance(member, inspect.ListType) and name is None:
            yield member.item_type
        elif isinstance(member, inspect.StructType):
            if name == member.tag_field:
                yield inspect.LiteralType((member.tag,))
            yield from (field.type for field in member.fields if field.encode_name == name)
