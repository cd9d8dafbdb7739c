"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Of buffers too large for Python's own arenas every fiftieth stays: the heap cannot shrink from its end.
PROGRAM = """
import ctypes, os, sys
from quire.service.http.freed_memory import FreedMemory, give_back

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
held = [bytes(20_000 + i % 1000) for i in range(4_000)]
full = resident()
held = held[::50]
freed = resident()
if sys.argv[1] == "thread":
    given = FreedMemory(0.01)
    given.start()
    while resident() - before > (full - before) / 4:
        pass
    given.stop()
else:
    give_back()
print(full - before, freed - before, resident() - before)
"""


def held_after(way: str) -> list[int]:
    """Return what a process held beside its beginning: at most, once it was freed, and once given back."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], check=True, capture_output=True, text=True, cwd=root, timeout=60
    )
    return [int(word) for word in done.stdout.split()]


def test_free_pages_between_others_go_back_to_the_system() -> None:
    full, freed, left = held_after("call")
    assert freed > full / 2, "this shows nothing: the C library gave them back by itself"
    assert left < full / 4


def test_a_thread_gives_them_back_by_itself() -> None:
    full, _, left = held_after("thread")
    assert left < full / 4
