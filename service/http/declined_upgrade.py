"""A request that offers to switch to another protocol, such as HTTP/2, read as one that does not.

Java's client offers it with its first request. The parser takes what follows such a head for that protocol,
and so gives the request no body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import httptools

_UPGRADE = b"upgrade"


def parser_for(protocol: Any) -> httptools.HttpRequestParser:
    """Return a parser of requests that tells `protocol`, as uvicorn makes it."""
    parser = httptools.HttpRequestParser(protocol)
    with contextlib.suppress(AttributeError):  # httptools before 0.6.3
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def declines(parser: httptools.HttpRequestParser) -> bool:
    """Return whether the head that was read offers a switch, without which it can be answered."""
    return bool(parser.should_upgrade()) and parser.get_method() != b"CONNECT"


def head_without_upgrade(
    parser: httptools.HttpRequestParser, url: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Return the head that was read, but for what offers the switch."""
    first = b"%b %b HTTP/%b\r\n" % (parser.get_method(), url, parser.get_http_version().encode())
    lines = [b"%b: %b\r\n" % (name, value) for name, value in headers if name != _UPGRADE]
    return b"".join([first, *lines, b"\r\n"])
