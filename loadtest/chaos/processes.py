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


def count_descriptors(pid: int, port: int, pooled: int) -> int:
    """But for connections to `port`, and for up to `pooled` sockets that are connected no more.

    A pool of connections finds out that one was lost when it next takes it.
    """
    to_port, alive = set(), set()
    for table in ("tcp", "tcp6", "unix"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            inode = f"socket:[{fields[6 if table == 'unix' else 9]}]"
            alive.add(inode)
            if table != "unix" and int(fields[2].rpartition(":")[2], 16) == port:
                to_port.add(inode)
    count = lost = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            is_lost = target.startswith("socket:") and target not in alive
            lost += is_lost
            count += not is_lost and target not in to_port
    return count + max(lost - pooled, 0)


def waited_seconds(pid: int) -> float:
    """How long its main thread, which has the event loop, has waited for a core to run on."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
