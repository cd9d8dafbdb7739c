"""What Linux says of a process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def children(pid: int, word: str) -> list[int]:
    """Those processes that `pid` has started whose command line has this word."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                        found.append(child)
    return found


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def count_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
