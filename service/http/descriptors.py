"""File descriptors: each connection is one, and a server that has none left can do nothing at all."""

from __future__ import annotations

import resource

RESERVED = 128  # for the engine, files, pipes and what libraries open


def raise_limit() -> int:
    """Raise this process's limit as far as it may itself; how many descriptors it can have then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS says "unlimited" and then refuses it
            return soft
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def most_connections(wanted: int, limit: int) -> int:
    """Return as many as are wanted, but two descriptors each: a router's has another one to a replica."""
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, (limit - RESERVED) // 2))
