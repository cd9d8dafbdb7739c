"""How each of the APIs that are served words its errors and sends its streams. A path tells which it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from quire.service.errors import ApiError, ErrorReply
from quire.service.http.framing import LINES, SSE, Framing

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
}

# the chat's fields that these APIs have by another name
_ANTHROPIC_NAMES = {
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
_OLLAMA_NAMES = {"response_format": "format"}


class AnthropicErrorDetail(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`code` is no field of Anthropic's, whose clients take what they do not know."""

    type: str
    message: str
    code: str | None = None


class AnthropicError(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


class OllamaError(msgspec.Struct, omit_defaults=True):
    """`code` is no field of Ollama's, whose clients read `error`. That stands first: a router looks there."""

    error: str
    code: str | None = None


@dataclass(frozen=True)
class Dialect:
    error: Callable[[ApiError], msgspec.Struct]
    error_name: str  # of the event that ends a stream
    content_type: bytes  # of a stream
    framing: Framing
    keep_alive: bytes  # what an idle stream gets; empty: nothing can be sent that says nothing
    request_id: tuple[bytes, ...] = ()  # headers beside X-Request-Id in which its clients look for it

    def body(self, error: ApiError) -> bytes:
        return msgspec.json.encode(self.error(error))

    def failure(self, error: ApiError) -> bytes:
        """Return the message that ends a stream."""
        return self.framing.message(self.body(error), self.error_name)


def _as_openai(error: ApiError) -> ErrorReply:
    return ErrorReply(error.detail)


def _calling(error: ApiError, names: Mapping[str, str]) -> str:
    """Return the message, with the field at its head called as the client gave it: both are chats here."""
    param = error.param or ""
    if param not in names or not error.message.startswith(param):
        return error.message
    return names[param] + error.message.removeprefix(param)


def _as_anthropic(error: ApiError) -> AnthropicError:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""  # agents look for it
    message = too_long + _calling(error, _ANTHROPIC_NAMES)
    return AnthropicError(error=AnthropicErrorDetail(type=kind, message=message, code=error.code))


def _as_ollama(error: ApiError) -> OllamaError:
    return OllamaError(_calling(error, _OLLAMA_NAMES), error.code)


_EVENTS = b"text/event-stream; charset=utf-8"
_COMMENT = b": keep-alive\n\n"

OPENAI = Dialect(_as_openai, "", _EVENTS, SSE, _COMMENT)
ANTHROPIC = Dialect(_as_anthropic, "error", _EVENTS, SSE, _COMMENT, (b"request-id",))
OLLAMA = Dialect(_as_ollama, "", b"application/x-ndjson", LINES, b"")

STREAM_TYPES = frozenset({"text/event-stream", "application/x-ndjson"})


def dialect_of(path: str) -> Dialect:
    if path.startswith("/api/"):
        return OLLAMA
    return ANTHROPIC if f"{path}/".startswith("/v1/messages/") else OPENAI
