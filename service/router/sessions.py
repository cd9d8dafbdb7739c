"""Connections to replicas: as many as there are requests, kept while idle, given up when one vanished."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import aiohttp
from aiohttp.abc import AbstractResolver

IDLE_SECONDS = 30.0  # half of what replicas keep an idle connection for
# A machine that vanished says nothing: its connections are given up after 10 + 3 * 5 s, also while something
# is on its way there, which nobody asks after.
_TCP_OPTIONS = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 25_000),
)


def open_session(connect_timeout: float, resolver: AbstractResolver | None = None) -> aiohttp.ClientSession:
    """Return a session that adds nothing to what is passed on.

    `resolver`: of names, if not the system's.
    """
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=IDLE_SECONDS,
        socket_factory=kept_alive_socket,
        resolver=resolver,
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[trace],
    )


class UsedConnection:
    """The connection that a request went over; give it as the request's `trace_request_ctx`."""

    reused = False


async def _note_reuse(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    if isinstance(context.trace_request_ctx, UsedConnection):
        context.trace_request_ctx.reused = True


def kept_alive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
