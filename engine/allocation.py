"""Memory that cannot be had: a refusal that says what would take it, and which flag asks for less."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# torch raises a plain RuntimeError for a host's memory, and a plain TypeError for sizes beyond 64 bits.
_OF_TORCH = re.compile(r"out of memory|(?:allocate|enough) memory|overflow", re.IGNORECASE)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def host_memory() -> str:
    """Return how much there is."""
    return f"the host has {gib(_host_bytes())}"


@contextmanager
def refused_where_too_large(
    what: str, lower: str, there_is: Callable[[], str] = host_memory, *, host_bytes: int = 0
) -> Iterator[None]:
    """Have it be a ValueError where there is no memory: `what` takes too much, and flags to `lower`.

    there_is: tells how much memory there is of the kind that is asked for. host_bytes: how much of the host's
    is asked for, as far as that is known. More than it has is refused before it is asked for: a system that
    overcommits gives it, and ends the process when it is written to.
    """
    if host_bytes > _host_bytes():
        raise ValueError(f"{what}, and {there_is()}: give a lower {lower}")
    try:
        yield
    except (RuntimeError, TypeError, MemoryError, OSError, OverflowError) as error:
        if not _is_of_memory(error):
            raise
        raise ValueError(f"{what}, and {there_is()}: give a lower {lower}") from None


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | OverflowError) or _OF_TORCH.search(str(error)) is not None


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
