"""Replicas behind a DNS name, such as a headless Service's: each address is one."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection

log = logging.getLogger("quire.router")

Resolve = Callable[[str, int], Awaitable[Collection[str]]]


async def resolve(host: str, port: int) -> Collection[str]:
    """Return the addresses of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


class DnsDiscovery:
    """Asks again and again. While nobody answers, or there is no address, the last ones stay."""

    def __init__(
        self,
        host: str,
        port: int,
        on_found: Callable[[list[str]], None],
        resolve: Resolve = resolve,
    ) -> None:
        """`on_found` is told the URLs at each answer."""
        self._host = host
        self._port = port
        self._on_found = on_found
        self._resolve = resolve
        self._answers = True

    async def run(self, seconds: float) -> None:
        while True:
            await self._look()
            await asyncio.sleep(seconds)

    async def _look(self) -> None:
        try:
            addresses = await self._resolve(self._host, self._port)
        except (OSError, UnicodeError) as error:  # a label that is too long is a UnicodeError
            if self._answers:
                log.warning("no address of %s, replicas stay as they were: %s", self._host, error)
            self._answers = False
            return
        self._answers = True
        self._on_found([self._url(address) for address in sorted(addresses)])

    def _url(self, address: str) -> str:
        return f"http://[{address}]:{self._port}" if ":" in address else f"http://{address}:{self._port}"
