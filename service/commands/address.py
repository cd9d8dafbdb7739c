"""Whether a server could listen at an address, told before anything is started for it."""

from __future__ import annotations

import errno
import os
import socket

_TRIED_PORTS = 100
_FIRST_UNPRIVILEGED = 1024


def check_address(host: str, port: int) -> None:
    """Raises ValueError that names a port that is free instead, or what is wrong with the host."""
    error = _error_at(host, port)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        other = free_port(host, port + 1)
        raise ValueError(f"port {port} is taken" + (f"; try --port {other}" if other else ""))
    if error.errno == errno.EACCES:
        raise ValueError(f"port {port} is for root only; try --port {free_port(host, 8000) or 8000}")
    raise ValueError(f"--host {host} is no address of this machine ({error.strerror}); try 127.0.0.1")


def free_port(host: str, first: int) -> int | None:
    """Return the first port from there at which a server could listen, unless that takes long to find."""
    if first == 0:
        return 0
    for port in range(max(first, _FIRST_UNPRIVILEGED), min(first + _TRIED_PORTS, 65536)):
        if _error_at(host, port) is None:
            return port
    return None


def _error_at(host: str, port: int) -> OSError | None:
    """Return what listening there raises. Of a name's addresses one will do, if the others are not here."""
    absent: OSError | None = None
    bound = False
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                if os.name == "posix":  # as servers do, so that connections that just ended are no hindrance
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                bound = True
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return error
            absent = error
    return None if bound else absent
