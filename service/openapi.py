"""GET /openapi.json, made from the types that validate."""

from __future__ import annotations

from typing import Any

import msgspec

from service import protocol, replies
from service.errors import ErrorReply
from service.responses.protocol import ResponseRequest
from service.responses.replies import ResponseReply

# path, method, summary, request type, reply type
_OPERATIONS: tuple[tuple[str, str, str, type | None, type | None], ...] = (
    ("/v1/completions", "post", "Continue a text", protocol.CompletionRequest, replies.CompletionReply),
    ("/v1/chat/completions", "post", "Answer in a chat", protocol.ChatRequest, replies.ChatReply),
    ("/v1/responses", "post", "Answer, in OpenAI's newer form", ResponseRequest, ResponseReply),
    ("/v1/models", "get", "List the served models", None, replies.ModelList),
    ("/v1/models/{name}", "get", "Describe a served model", None, replies.Model),
    ("/tokenize", "post", "Text or messages to token ids", protocol.TokenizeRequest, replies.TokenizeReply),
    ("/detokenize", "post", "Token ids to text", protocol.DetokenizeRequest, replies.DetokenizeReply),
    ("/health", "get", "Whether the process is alive", None, None),
    ("/ready", "get", "Whether requests would be served", None, None),
    ("/startup", "get", "The start-up phases, as server-sent events", None, None),
    ("/metrics", "get", "Prometheus metrics", None, None),
)
_STREAMS = (protocol.CompletionRequest, protocol.ChatRequest, ResponseRequest)


def describe(version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = [kind for *_, request, reply in _OPERATIONS for kind in (request, reply) if kind is not None]
    _, components = msgspec.json.schema_components(
        [*types, ErrorReply], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for path, method, summary, request, reply in _OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, request, reply)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, summary: str, request: type | None, reply: type | None) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if reply is not None:
        content["application/json"] = {"schema": _reference(reply)}
    if request in _STREAMS:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "with stream: true"}}
    error = {"description": "Error", "content": {"application/json": {"schema": _reference(ErrorReply)}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": content}, "default": error},
    }
    if "{name}" in path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(request)}},
        }
    if path.startswith("/v1") or request is not None:
        operation["security"] = [{"key": []}]
    return operation


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
