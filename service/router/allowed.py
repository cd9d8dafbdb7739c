"""Replicas of the registry that are believed: whoever can write there could have API keys sent to it."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from aiohttp import ThreadedResolver
from aiohttp.abc import ResolveResult

# Loopback, private (RFC 1918, RFC 4193), and shared (RFC 6598), which some clouds take for pods.
PRIVATE = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "::1", "fc00::/7")

_NAME = r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*"
_HOST_NAME = re.compile(_NAME)
_PATTERN = re.compile(rf"(\*\.)?{_NAME}")
_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(:[0-9]{1,5})?")

Address = IPv4Address | IPv6Address


class AllowedReplicas:
    """Entries are networks, addresses, host names, and `*.domain`; without any, private networks.

    A name that is no entry is as good as the addresses it has, which are looked at for every connection.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises ValueError."""
        self._networks: list[IPv4Network | IPv6Network] = []
        self._names: list[str] = []
        for entry in tuple(entries) or PRIVATE:
            network = _network(entry)
            if network is not None:
                self._networks.append(network)
            elif _PATTERN.fullmatch(entry.lower()) and not _is_numeric(entry):
                self._names.append(entry.lower())
            else:
                raise ValueError(
                    "--allow-replica must be a network such as 10.0.0.0/8, an address, a host name, or "
                    f"*.domain, got {entry!r}"
                )

    def admits(self, url: str) -> bool:
        """Return whether a registered URL is one, and nothing is wrong with its host so far."""
        host = host_of(url)
        if host is None:
            return False
        address = _address(host)
        return self.names(host) or address is None or self.holds(address)

    def names(self, host: str) -> bool:
        """Return whether it is allowed by its name, wherever it is."""
        return any(host.endswith(name[1:]) if name.startswith("*.") else host == name for name in self._names)

    def holds(self, address: Address) -> bool:
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


class AllowedResolver(ThreadedResolver):
    """Finds of a name only the addresses that are allowed."""

    def __init__(self, allowed: AllowedReplicas) -> None:
        super().__init__()
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises OSError if there is none."""
        found = await super().resolve(host, port, family)
        if self._allowed.names(host.lower()):
            return found
        allowed = [each for each in found if self._allowed.holds(ip_address(each["host"]))]
        if not allowed:
            raise OSError(errno.EACCES, f"{host} has no address that --allow-replica allows")
        return allowed


def host_of(url: str) -> str | None:
    """Return it in lower case, an address without brackets; None unless it is a URL of a replica."""
    if not _URL.fullmatch(url):
        return None
    try:
        parts = urlsplit(url)
        host = parts.hostname
        if host is None or parts.port == 0:  # raises ValueError above 65535
            return None
    except ValueError:
        return None
    # "2130706433" and "127.1" are addresses for some, and names for others.
    is_one = _address(host) is not None if _is_numeric(host) else _HOST_NAME.fullmatch(host)
    return host if is_one else None


def _is_numeric(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


def _address(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _network(entry: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(entry)
    except ValueError:
        return None
