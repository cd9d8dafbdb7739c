"""Headers that go through the router."""

from __future__ import annotations

import re
from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

# They belong to one connection, or are made anew by whoever sends the message on.
_OWN = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"expect",
        b"host",
        b"keep-alive",
        b"origin",  # the gate has checked it, and the router answers for CORS
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"request-id",  # what Anthropic's clients call x-request-id
        b"sec-websocket-extensions",
        b"sec-websocket-key",
        b"sec-websocket-protocol",
        b"sec-websocket-version",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",  # the gate's own, which is the client's if it gave one
    }
)
# What HTTP allows; Python's clients take more, and its servers send no more.
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")


def are_well_formed(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in headers)


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return them in lower case."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _OWN]


def as_text(headers: Headers) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
