"""Requests decoded to types, and replies encoded from them."""

from __future__ import annotations

import re
import time
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import FieldError
from quire.service.errors import ERROR_HEADER, ApiError, bad_value, refused
from quire.service.http.alternatives import allowed
from quire.service.http.dialects import dialect_of
from quire.service.http.query import parameters_without_effect
from quire.service.http.tidying import tidy
from quire.service.json_fields import MAX_PROMPT_TOKENS
from quire.service.json_objects import wrong_key

T = TypeVar("T")

# Decoding goes by values and holds up all streams: 8 MiB of small numbers would take a tenth of a second.
_MAX_COMMAS = MAX_PROMPT_TOKENS + 4096

_PATH = re.compile(r"`\$\.?([^`]*)`$")
_AT = re.compile(r" - at `[^`]*`$")
_ENTRY = re.compile(r" - at `(?:\$\.(\w+)\[\.\.\.\]`|key` in `\$\.(\w+)`)$")
_NAMED = re.compile(r"(unknown field|missing required field) `([^`]*)`")

# How msgspec tells of half a surrogate pair, behind which it stands; near the end the other half lacks bytes.
_HALF = re.compile(r"utf-16 surrogate pair \(byte (\d+)\)$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_TRUNCATED = "Input data was truncated"
_FIRST_HALF = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2}).{,5}\Z", re.DOTALL)
_MOST_ESCAPED = 64  # bytes at the end, in which such a half is looked for


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: ApiError, path: str) -> Response:
    """Return it as clients of this path expect it."""
    headers = error.headers if error.code is None else {**error.headers, ERROR_HEADER: error.code}
    return Response(dialect_of(path).body(error), error.status, headers, "application/json")


class Read(NamedTuple, Generic[T]):
    """A request, and the fields in it that have no effect."""

    body: T
    ignored: tuple[str, ...] = ()


async def decode(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the request's body. Raises ApiError 400 whose `param` is the field at fault, or 413.

    The fields without effect, and the URL's parameters, are noted for the gate, which names them in the
    answer.
    """
    parameters = parameters_without_effect(request.scope["query_string"], decoder.type)
    body, state = await request.body(), request.scope["state"]
    request.state.received = time.monotonic()
    if body.count(b",") > _MAX_COMMAS:
        raise ApiError(
            413, f"the body has more than {_MAX_COMMAS} commas, so more values than a prompt may have tokens"
        )
    found = read(body, decoder, ignore_unknown=state.get("ignore_unknown", False))
    state["ignored"] = (*found.ignored, *parameters)
    return found.body


def parse(data: bytes | str, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises ApiError 400 whose `param` is the field at fault."""
    return read(data, decoder).body


def read(data: bytes | str, decoder: msgspec.json.Decoder[T], *, ignore_unknown: bool = False) -> Read[T]:
    """Raises ApiError 400 whose `param` is the field at fault.

    Most bodies are strictly valid, so that is tried first.
    """
    try:
        return Read(decoder.decode(data))
    except msgspec.ValidationError as error:
        wrong = error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_value(None, f"this is not valid JSON: {_why(error, data)}", "invalid_json") from None
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise _bad_field(wrong, decoder.type, None) from None
    try:
        tidied = tidy(body, decoder.type, ignore_unknown=ignore_unknown)
        return Read(decoder.decode(msgspec.json.encode(tidied.body)), tidied.ignored)
    except msgspec.ValidationError as error:
        raise _bad_field(error, decoder.type, tidied.body) from None


def _why(error: Exception, data: bytes | str) -> str:
    """Return what is wrong: half a surrogate pair is no character, which msgspec may call truncated data."""
    told = str(error)
    raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    half = None
    if found := _HALF.search(told):
        before = raw[: int(found[1])]
        half = before[-6:] if _SURROGATE.fullmatch(before[-6:]) else before[-12:-6]
    elif told == _TRUNCATED and (cut := _FIRST_HALF.search(raw[-_MOST_ESCAPED:])):
        half = cut[1]
    if half is None:
        return told
    return f"{half.decode()} is half of a surrogate pair: write both halves, or the character itself"


def _bad_field(error: msgspec.ValidationError, kind: Any, body: Any) -> ApiError:
    """Name the field at fault, or what is unknown or missing in it: msgspec says `... - at `$.a[0].b``."""
    message = str(error)
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    own = error.__cause__  # a check of ours, of the whole body
    if isinstance(own, FieldError) and not path:
        return refused(own)
    named = _NAMED.search(message)
    if named is not None:
        problem, name = named.groups()
        param = f"{path}.{name}" if path else name
        if problem == "unknown field":
            return bad_value(param, f"unknown field {param!r}: it is not supported here", "unknown_field")
        return bad_value(param, f"{problem} {param!r}", "missing_field")
    entry = _ENTRY.search(message)
    if entry is not None and isinstance(body, dict) and isinstance(kind, type):
        field = entry[1] or entry[2]
        key = wrong_key(body[field], get_type_hints(kind, include_extras=True)[field])
        if key is not None:
            return bad_value(f"{field}.{key}", f"{field}.{key}: {_ENTRY.sub('', message)}")
    if path:
        return bad_value(path, f"{path}: {_AT.sub('', message)}{allowed(kind, message)}")
    return bad_value(None, message)
