"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# One buffer of the largest kind teaches the C library to keep such; then of many every fiftieth stays, so
# that the heap cannot shrink from its end.
PROGRAM = """
import os, sys
from quire.service.http.freed_memory import give_freed_memory_back

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "back":
    give_freed_memory_back()
del (teacher := [bytes(30 << 20)])[:]
before = resident()
held = [b"x" * (1_000_000 + i) for i in range(200)]
full = resident()
held = held[::50]
print(full - before, resident() - before)
"""


def held_after(way: str) -> tuple[int, int]:
    """Return what a process held beside its beginning: at most, and once most of it was freed."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], check=True, capture_output=True, text=True, cwd=root, timeout=60
    )
    full, left = map(int, done.stdout.split())
    return full, left


def test_large_buffers_go_back_to_the_system() -> None:
    full, left = held_after("back")
    assert left < full / 10


def test_by_itself_the_c_library_keeps_them() -> None:
    full, left = held_after("kept")
    assert left > full / 2, "then the test above shows nothing"
