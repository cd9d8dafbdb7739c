"""GET /openapi.json, made from the types that validate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from quire.service.answer import replies
from quire.service.api.requests.chat import ChatRequest
from quire.service.api.requests.completions import CompletionRequest
from quire.service.api.requests.tokens import DetokenizeRequest, TokenizeRequest
from quire.service.api.responses.protocol import ResponseRequest
from quire.service.api.responses.replies import ResponseReply
from quire.service.errors import ErrorReply

_JSON, _SSE, _TEXT, _HTML = "application/json", "text/event-stream", "text/plain", "text/html"
_ANY = {
    400: "A value that is not understood or not allowed; `param` names it, the Host header included",
    431: "The path and the headers are too large",
}
_KEYED = {401: "No valid API key"}
_NOT_READY = {503: "Loading, shutting down, the engine is dead or stalled, or a process was lost: try again"}
_BODY = {
    404: "No such model",
    408: "The body did not come in time",
    413: "The body, or the prompt in it, is too large",
    415: "Not application/json",
    500: "A failure of ours, or of the engine on this request",
}
_QUEUED = {429: "The queue is full"}
_PICKED_UP = {
    404: "No such stream of this API key, or no longer",
    409: "Another connection reads it now",
    410: "The events after Last-Event-ID are forgotten",
    500: "It failed before its first event",
    503: "It ended before its first event, with the server or because the engine was stalled",
}
_RETRIED = (429, 503)


@dataclass(frozen=True)
class Parameter:
    name: str
    place: Literal["path", "header"]
    description: str
    schema: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "in": self.place,
            "required": self.place == "path",
            "description": self.description,
            "schema": {"type": "string", **self.schema},
        }


_STREAM_ID = {"pattern": "^[A-Za-z0-9._-]{1,64}$"}
_CHOSEN_ID = Parameter(
    "X-Stream-Id", "header", "With stream: true, the stream can be picked up again", _STREAM_ID
)
_LAST_EVENT = Parameter(
    "Last-Event-ID", "header", "Only what follows this event", {"pattern": r"^[0-9]{1,10}(\.[0-9]{1,10})?$"}
)


@dataclass(frozen=True)
class Operation:
    """`errors` are all that can come instead of a 200, which is of the kinds `content`."""

    path: str
    summary: str
    errors: dict[int, str]
    request: type | None = None
    reply: type | None = None
    content: tuple[str, ...] = (_JSON,)
    parameters: tuple[Parameter, ...] = ()
    empty: str = ""  # when it is answered with 204

    @property
    def method(self) -> str:
        return "get" if self.request is None else "post"


_POST = _ANY | _KEYED | _BODY | _QUEUED | _NOT_READY
_GET = _ANY | _KEYED | _NOT_READY


def _generation(path: str, summary: str, request: type, reply: type) -> Operation:
    in_use = {409: "A stream of this X-Stream-Id is there already, or another connection reads this one now"}
    return Operation(path, summary, _POST | in_use, request, reply, (_JSON, _SSE), (_CHOSEN_ID,))


OPERATIONS = (
    _generation("/v1/completions", "Continue a text", CompletionRequest, replies.CompletionReply),
    _generation("/v1/chat/completions", "Answer in a chat", ChatRequest, replies.ChatReply),
    _generation("/v1/responses", "Answer, in OpenAI's newer form", ResponseRequest, ResponseReply),
    Operation("/v1/models", "List the served models", _GET, reply=replies.ModelList),
    Operation(
        "/v1/models/{name}",
        "Describe a served model",
        _GET | {404: "No such model"},
        reply=replies.Model,
        parameters=(Parameter("name", "path", "As it is served", {"minLength": 1}),),
    ),
    Operation(
        "/v1/streams/{stream_id}",
        "Pick up a stream that was started with an X-Stream-Id",
        _ANY | _KEYED | _PICKED_UP,
        content=(_SSE,),
        parameters=(Parameter("stream_id", "path", "Its X-Stream-Id", _STREAM_ID), _LAST_EVENT),
        empty="There is nothing after Last-Event-ID",
    ),
    Operation("/tokenize", "Text or messages to token ids", _POST, TokenizeRequest, replies.TokenizeReply),
    Operation("/detokenize", "Token ids to text", _POST, DetokenizeRequest, replies.DetokenizeReply),
    Operation("/health", "Whether the process is alive", _ANY | _NOT_READY, reply=replies.Health),
    Operation("/ready", "Whether requests would be served", _ANY | _NOT_READY, reply=replies.Readiness),
    Operation("/startup", "The start-up phases as they go", _ANY | _NOT_READY, content=(_SSE,)),
    Operation("/metrics", "Prometheus metrics", _ANY, content=(_TEXT,)),
    Operation("/version", "The version of Quire", _ANY, reply=replies.Version),
    Operation("/openapi.json", "This document", _ANY),
    Operation("/docs", "This document as a page", _ANY, content=(_HTML,)),
    Operation("/", "The chat page", _ANY, content=(_HTML,)),
)


def describe(version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document, which has no words for the WebSocket mode of /v1/responses."""
    types = [kind for each in OPERATIONS for kind in (each.request, each.reply) if kind is not None]
    _, components = msgspec.json.schema_components(
        [*types, ErrorReply], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version},
        "paths": paths,
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
    for status, description in sorted(operation.errors.items()):
        error = {_JSON: {"schema": _reference(ErrorReply)}}
        responses[str(status)] = _response(description, error, status)
    if operation.empty:
        responses["204"] = _response(operation.empty, {})
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.parameters:
        described["parameters"] = [parameter.describe() for parameter in operation.parameters]
    if operation.request is not None:
        content = {_JSON: {"schema": _reference(operation.request)}}
        described["requestBody"] = {"required": True, "content": content}
    if 401 in operation.errors:
        described["security"] = [{"key": []}]
    return described


def _schema(operation: Operation, kind: str) -> dict[str, Any]:
    if kind == _SSE:
        description = "an event, with stream: true" if operation.request is not None else "an event"
        event = {name: {"type": "string"} for name in ("data", "event", "id")}
        return {"schema": {"type": "object", "properties": event, "description": description}}
    if kind != _JSON:
        return {"schema": {"type": "string"}}
    return {"schema": {"type": "object"} if operation.reply is None else _reference(operation.reply)}


def _response(description: str, content: dict[str, Any], status: int = 200) -> dict[str, Any]:
    names = ["x-request-id"]
    if status in _RETRIED:
        names.append("retry-after")
    if status == 401:
        names.append("www-authenticate")
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": description, "headers": headers, "content": content}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
