"""Requests decoded to types, and replies encoded from them."""

from __future__ import annotations

import re
import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import FieldError
from quire.service.errors import ApiError, bad_value, refused
from quire.service.http.alternatives import alternatives
from quire.service.json_fields import MAX_PROMPT_TOKENS

T = TypeVar("T")

# Decoding goes by values and holds up all streams: 8 MiB of small numbers would take a tenth of a second.
_MAX_COMMAS = MAX_PROMPT_TOKENS + 4096

_PATH = re.compile(r"`\$\.?([^`]*)`$")
_NAMED = re.compile(r"(unknown field|missing required field) `([^`]*)`")
_IN_MESSAGE = re.compile(r"unknown field `[^`]*` - at `\$\.messages\[\d+\]`$")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def decode(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The request's body. Raises ApiError 400 whose `param` is the field at fault, or 413."""
    body = await request.body()
    request.state.received = time.monotonic()
    if body.count(b",") > _MAX_COMMAS:
        raise ApiError(
            413, f"the body has more than {_MAX_COMMAS} commas, so more values than a prompt may have tokens"
        )
    return parse(body, decoder)


def parse(data: bytes | str, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises ApiError 400 whose `param` is the field at fault."""
    try:
        return decode_body(data, decoder)
    except msgspec.ValidationError as error:
        raise _bad_field(error, decoder.type) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_value(None, f"this is not valid JSON: {error}", "invalid_json") from None


def decode_body(data: bytes | str, decoder: msgspec.json.Decoder[T]) -> T:
    """A message's unknown fields that are null say nothing: clients send back all that theirs have."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if not _IN_MESSAGE.search(str(error)):
            raise
    return decoder.decode(_without_nulls(data))


def _without_nulls(data: bytes | str) -> bytes:
    """The body less what its messages have that is null."""
    body: dict[str, Any] = msgspec.json.decode(data)
    messages = body["messages"]
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            for name in [name for name, value in message.items() if value is None]:
                del message[name]
    return msgspec.json.encode(body)


def _bad_field(error: msgspec.ValidationError, kind: object) -> ApiError:
    """Name the field at fault, or what is unknown or missing in it: msgspec says `... - at `$.a[0].b``."""
    message = str(error)
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    named = _NAMED.search(message)
    if named is not None:
        problem, name = named.groups()
        param = f"{path}.{name}" if path else name
        if problem == "unknown field":
            return bad_value(param, f"unknown field {param!r}: it is not supported here", "unknown_field")
        return bad_value(param, f"{problem} {param!r}", "missing_field")
    if path:
        allowed = alternatives(kind, path) if message.startswith("Invalid") else []
        hint = f"; strings allowed here: {', '.join(map(repr, allowed))}" if allowed else ""
        return bad_value(path, f"{path}: {message}{hint}")
    own = error.__cause__  # a check of ours
    return refused(own) if isinstance(own, FieldError) else bad_value(None, message)
