"""A body less what says nothing, and less what has no effect: what is left is decoded strictly.

Null is as if left out, at every level that has a type; so is an empty list of objects where one must not be
empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import inspect

from quire.service.errors import bad_value
from quire.service.http.alternatives import allowed, members
from quire.service.inert import Inert, is_empty, rows_of

MAX_IGNORED = 64  # names that are remembered of one body

_INDEX = re.compile(r"\[\d+\]")

T = TypeVar("T")


class Own(NamedTuple, Generic[T]):
    """The objects of a list that are read here, as `kind`, among others, which stay as they are.

    A list says so with the note `Meta(extra={"own": …})` on its items.
    """

    kind: type[T]
    types: tuple[str | None, ...]  # that `type` may be

    def has(self, item: dict[str, Any]) -> bool:
        """Return whether it is one; what is of no type that could be another's is a wrong one."""
        return not isinstance(item.get("type"), str) or item["type"] in self.types


class _Place(NamedTuple):
    """What may stand somewhere: objects of these types, or a list of such items, so many of them."""

    structs: tuple[inspect.StructType, ...]
    items: _Place | None
    least: int
    most: int | None = None
    own: Own[Any] | None = None


class _Field(NamedTuple):
    place: _Place
    required: bool


class Tidied(NamedTuple):
    body: Any
    ignored: tuple[str, ...]  # fields without effect, as `messages[].id`


def tidy(body: Any, kind: type, *, ignore_unknown: bool) -> Tidied:
    """Return what of `body` says something to a request of this kind.

    Fields that nobody knows stay, for the decoder to refuse, unless they are to be ignored. Raises ApiError
    400 for a field without effect of a wrong type, and for one that cannot be supported.
    """
    ignored: dict[str, None] = {}
    return Tidied(_tidied(body, _place_of(kind), "", ignored, ignore_unknown), tuple(ignored))


def structs_in(kind: type) -> Iterator[type]:
    """Return the types of all objects in a request of this kind."""
    places = [_place_of(kind)]
    while places:
        place = places.pop()
        if place.items is not None:
            places.append(place.items)
        for struct in place.structs:
            yield struct.cls
            places += [field.place for field in _fields(struct.cls).values()]


def _tidied(value: Any, place: _Place, path: str, ignored: dict[str, None], ignore_unknown: bool) -> Any:
    if isinstance(value, list) and place.items is not None:
        items = place.items
        if place.most is not None and len(value) > place.most:  # all streams would wait for these
            raise bad_value(path, f"{path}: Expected `array` of length <= {place.most}")
        return [
            _tidied(item, items, f"{path}[{at}]", ignored, ignore_unknown) for at, item in enumerate(value)
        ]
    struct = _chosen(place, value) if isinstance(value, dict) else None
    if struct is None:
        return value
    fields, rows, kept = _fields(struct.cls), rows_of(struct.cls), {}
    for name, inner in value.items():
        where = f"{path}.{name}" if path else name
        field, row = fields.get(name), rows.get(name)
        if field is not None:
            empty = inner is None or (inner == [] and field.place.items is not None and field.place.least > 0)
            if field.required or not empty:
                kept[name] = _tidied(inner, field.place, where, ignored, ignore_unknown)
        elif row is not None and inner is not None:
            try:
                row.check(inner)
            except ValueError as error:
                says, code = f"{where} is not supported: {error}", "unsupported_field"
                if isinstance(row, Inert):
                    says, code = f"{where}: {error}{allowed(row.kind, str(error))}", "invalid_value"
                raise bad_value(where, says, code) from None
            if not is_empty(inner):
                _note(ignored, where)
        elif name == struct.tag_field or (inner is not None and not ignore_unknown):
            kept[name] = inner
        elif inner is not None:
            _note(ignored, where)
    return kept


def _note(ignored: dict[str, None], where: str) -> None:
    if len(ignored) < MAX_IGNORED:
        ignored[_INDEX.sub("[]", where)] = None


def _chosen(place: _Place, value: dict[str, Any]) -> inspect.StructType | None:
    """Return the type of an object: the only one, or the one that its tag names. Another's has none."""
    if place.own is not None and not place.own.has(value):
        return None
    if len(place.structs) == 1:
        return place.structs[0]
    tagged = (each for each in place.structs if each.tag_field)
    return next((each for each in tagged if value.get(each.tag_field or "") == each.tag), None)


@cache
def _place_of(kind: Any) -> _Place:
    return _place(inspect.type_info(kind))


def _place(kind: inspect.Type) -> _Place:
    own = (kind.extra or {}).get("own") if isinstance(kind, inspect.Metadata) else None
    if own is not None:
        return _place_of(own.kind)._replace(own=own)
    structs: list[inspect.StructType] = []
    items, least, most = None, 0, None
    for member in members(kind):
        if isinstance(member, inspect.StructType):
            structs.append(member)
        elif isinstance(member, inspect.ListType):
            items, least, most = _place(member.item_type), member.min_length or 0, member.max_length
    if items is not None and not items.structs and items.items is None:
        items = None  # plain values, of which there may be many
    return _Place(tuple(structs), items, least, most)


@cache
def _fields(kind: type) -> dict[str, _Field]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: _Field(_place(field.type), field.required) for field in info.fields}
