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


def count_descriptors(pid: int, port: int) -> int:
    """Those that are no connection to `port`."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    left_out = {f"socket:[{each[9]}]" for each in fields if int(each[2].rpartition(":")[2], 16) == port}
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/{pid}/fd/{name}") not in left_out
    return count


def waited_seconds(pid: int) -> float:
    """How long its main thread, which has the event loop, has waited for a core to run on."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
