"""The schemas of requests as they are really read: null is as if left out, and some fields have no effect."""

from __future__ import annotations

from typing import Any

from quire.service.http.tidying import structs_in
from quire.service.inert import rows_of

_NULL = {"type": "null"}
_NOTHING_ELSE = (
    "Other fields are refused by name, unless they are null (or the server ignores unknown fields)"
)


def widen(components: dict[str, Any], requests: list[type]) -> None:
    """Add to the `components` of these requests what is accepted and changes nothing."""
    for kind in {struct for request in requests for struct in structs_in(request)}:
        component = components[kind.__name__]
        required = component.get("required", [])
        properties = component["properties"]
        for name, schema in properties.items():
            if name not in required:
                properties[name] = _or_nothing(schema)
        for name, row in rows_of(kind).items():
            properties[name] = {"anyOf": [row.schema(), _NULL]}
        component["additionalProperties"] = {**_NULL, "description": _NOTHING_ELSE}


def _or_nothing(schema: dict[str, Any]) -> dict[str, Any]:
    """Also null, and an empty list where there may be a list of objects."""
    notes = {name: value for name, value in schema.items() if name in ("description", "default")}
    plain = {name: value for name, value in schema.items() if name not in notes}
    choices = [_maybe_empty(each) for each in plain.get("anyOf", [plain])]
    return {"anyOf": choices if _NULL in choices else [*choices, _NULL], **notes}


def _maybe_empty(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [_maybe_empty(each) for each in schema["anyOf"]]}
    if "$ref" not in str(schema.get("items")):
        return schema
    return {name: value for name, value in schema.items() if name != "minItems"}
