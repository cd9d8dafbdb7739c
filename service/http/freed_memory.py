"""Has the C library give freed memory back to the system.

By itself it learns from each large buffer that is freed to keep ones of that size, up to 32 MiB: a server
would keep what a few large requests took, and a leak would hide in it. Giving it back now and again from
another thread (`malloc_trim`) holds the heap's lock for as long as that thread waits for a core, and with it
the event loop.
"""

from __future__ import annotations

import ctypes

# glibc's <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE_BYTES = 128 << 10  # what is larger is a mapping of its own, which ends with it
KEPT_BYTES = 1 << 20  # at the end of a heap
HEAPS = 1  # else one for each of many threads, and what one heap has free another cannot use


def give_freed_memory_back() -> None:
    """Fix the sizes from which on freed memory goes back; without effect where the C library is not glibc."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)
        set_option(M_ARENA_MAX, HEAPS)
