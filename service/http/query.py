"""The parameters in the URL of a request that has a body: clients add some, and none has an effect."""

from __future__ import annotations

from itertools import islice
from typing import Any
from urllib.parse import parse_qsl

from quire.service.errors import bad_value
from quire.service.http.tidying import MAX_IGNORED
from quire.service.inert import Refused, rows_of


def parameters_without_effect(query: bytes, kind: Any) -> list[str]:
    """Name them, as `?beta`. Raises ApiError 400 for one that is a field of the body, of this Struct."""
    if not query:
        return []
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    names = list(islice(given, MAX_IGNORED))
    for name in names:
        if name in kind.__struct_fields__ or isinstance(rows_of(kind).get(name), Refused):
            raise bad_value(name, f"{name} has no effect in the URL: put it into the body")
    return [f"?{name}" for name in names]
