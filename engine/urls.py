"""URLs that flags take."""

from __future__ import annotations

from urllib.parse import urlsplit


def check_redis_url(url: str) -> None:
    """Raises ValueError without the password."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError(
            "--redis-url must be redis://[user:password@]host[:port][/db], or rediss:// for TLS, got "
            f"{without_password(url)!r}"
        )


def check_http_url(flag: str, url: str) -> None:
    """Raises ValueError."""
    if not _is_http_url(url):
        raise ValueError(f"{flag} must be http://host[:port] or https://host[:port], got {url!r}")


def check_replica_url(flag: str, url: str) -> None:
    """Raises ValueError without the password."""
    check_http_url(flag, url)
    parts = urlsplit(url)
    plain = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if "@" in parts.netloc:
        raise ValueError(
            f"{flag} must be without user and password, since answers name it to clients: give {plain}"
        )
    if parts.path:  # a client's path may lead out of it, by `..`
        raise ValueError(
            f"{flag} must be without a path: a replica answers at the root of its address, and clients' "
            f"paths are passed on as they are: give {plain}"
        )


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:  # a port that is none, or half of an address' brackets
        return False
    is_plain = not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port and is_plain


def split_address(flag: str, address: str) -> tuple[str, int]:
    """Return host and port. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or set(host) & set("/@[]: ") or not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{flag} must be name:port, got {address!r}")
    return host, int(port)


def without_password(url: str) -> str:
    """For logs."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()
