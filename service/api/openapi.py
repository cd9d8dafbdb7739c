"""GET /openapi.json, made from the types that validate."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.service.api.operations import JSON, OPERATIONS, RETRIED, SSE, Operation
from quire.service.api.request_schemas import widen
from quire.service.api.sockets.description import SOCKETS
from quire.service.http.tidying import structs_in


def describe(version: str) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document. It has no words for WebSockets, which stand in `x-websockets`."""
    types = [
        kind for each in OPERATIONS for kind in (each.request, each.reply, each.error) if kind is not None
    ]
    types += [kind for socket in SOCKETS for kind in (*socket.client, *socket.server)]
    requests = [each.request for each in OPERATIONS if each.request is not None]
    requests += [kind for socket in SOCKETS for kind in socket.client]
    types += [kind for request in requests for kind in structs_in(request)]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    widen(components, requests)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version},
        "paths": paths,
        "x-websockets": {
            socket.path: {
                "summary": socket.summary,
                "security": [{"key": []}],
                "client": {"anyOf": [_reference(kind) for kind in socket.client]},
                "server": {"anyOf": [_reference(kind) for kind in socket.server]},
            }
            for socket in SOCKETS
        },
        "components": {
            "schemas": components,
            "headers": {
                "x-request-id": {
                    "description": "The request's own, if it matches [A-Za-z0-9._-]{1,64}, else a new one",
                    "schema": {"type": "string"},
                },
                "retry-after": {
                    "description": "Seconds after which to try again",
                    "schema": {"type": "integer", "minimum": 1},
                },
                "x-quire-error": {
                    "description": "The error's code, if it has one",
                    "schema": {"type": "string"},
                },
                "x-quire-ignored": {
                    "description": "The fields of the request that had no effect, if there were any",
                    "schema": {"type": "string"},
                },
                "www-authenticate": {
                    "description": "How the key is to be given",
                    "schema": {"type": "string", "const": "Bearer"},
                },
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(operation: Operation) -> dict[str, Any]:
    responses = {"200": _response("OK", {kind: _schema(operation, kind) for kind in operation.content})}
    if operation.request is not None:
        responses["200"]["headers"]["x-quire-ignored"] = {"$ref": "#/components/headers/x-quire-ignored"}
    for status, description in sorted(operation.errors.items()):
        error = {JSON: {"schema": _reference(operation.error)}}
        responses[str(status)] = _response(description, error, status)
    if operation.empty:
        responses["204"] = _response(operation.empty, {})
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.parameters:
        described["parameters"] = [parameter.describe() for parameter in operation.parameters]
    if operation.request is not None:
        content = {JSON: {"schema": _reference(operation.request)}}
        described["requestBody"] = {"required": True, "content": content}
    if 401 in operation.errors:
        described["security"] = [{"key": []}]
    return described


def _schema(operation: Operation, kind: str) -> dict[str, Any]:
    if kind == SSE:
        description = "an event, with stream: true" if operation.request is not None else "an event"
        event = {name: {"type": "string"} for name in ("data", "event", "id")}
        return {"schema": {"type": "object", "properties": event, "description": description}}
    if kind != JSON:
        return {"schema": {"type": "string"}}
    return {"schema": {"type": "object"} if operation.reply is None else _reference(operation.reply)}


def _response(description: str, content: dict[str, Any], status: int = 200) -> dict[str, Any]:
    names = ["x-request-id"]
    if status >= 400:
        names.append("x-quire-error")
    if status in RETRIED:
        names.append("retry-after")
    if status == 401:
        names.append("www-authenticate")
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": description, "headers": headers, "content": content}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
