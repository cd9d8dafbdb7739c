"""Errors as the API words them: `{"error": {message, type, param, code}}` with a status."""

from __future__ import annotations

import msgspec

from quire.engine.errors import FieldError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "gone_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "server_error",
    503: "service_unavailable_error",
}

ERROR_HEADER = "x-quire-error"  # has an error's code, which older servers' bodies lack in some APIs
ENGINE_DEAD = "engine_dead"
ENGINE_STALLED = "engine_stalled"
REPLICA_LOST = "replica_lost"

_MOST_SHOWN = 4096  # characters of a message, which may quote what a client sent, however long that was
_MOST_NAMED = 512  # characters of a field's name, which may be a client's own


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """Something went wrong, as a client is told. `retry_after`, in seconds, and `allow` become headers.

    Of a long message or name the beginning and the end are kept.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        message = _shown(message, _MOST_SHOWN)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else _shown(param, _MOST_NAMED)
        self.code = code
        self.retry_after = retry_after
        self.allow = allow

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        headers |= {} if self.allow is None else {"allow": self.allow}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    @property
    def detail(self) -> ErrorDetail:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorReply(self.detail))


def _shown(text: str, most: int) -> str:
    """Return it, or its two ends if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-(most // 2) :]}"


class ServerFailed(RuntimeError):
    """What ended a server, or kept it from starting; the log has it, too."""


class TemplateError(ValueError):
    """A chat template refused the messages, or failed on them."""


def bad_value(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def refused(error: FieldError) -> ApiError:
    return bad_value(error.field, str(error), error.code)


def not_ready(message: str, retry_after: int = 1) -> ApiError:
    return ApiError(503, message, code="not_ready", retry_after=retry_after)


def worker_lost(message: str) -> ApiError:
    """Return the error of a request that a lost process beside the server worked on; it takes others."""
    return ApiError(503, message, code="worker_lost", retry_after=1)


def engine_dead(error: str | None, status: int = 503) -> ApiError:
    """500 for what the engine may have begun, which another one is not to get, too."""
    return ApiError(status, f"the engine died: {error}", code=ENGINE_DEAD)


def too_large(param: str, size: int, limit: int) -> ApiError:
    message = f"{param}: the prompt has {size} bytes, more than {limit}"
    return ApiError(413, message, param=param, code="prompt_too_large")


def no_room(param: str, prompt: str, limit: int) -> ApiError:
    """`prompt` says how many tokens it has."""
    message = f"{prompt}, which leaves no room for an answer in {limit} tokens"
    return bad_value(param, message, "context_length_exceeded")
