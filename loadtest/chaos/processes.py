"""Read what Linux says of a process."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def children(pid: int, word: str) -> list[int]:
    """Return the processes that `pid` has started whose command line has this word."""
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


@dataclass(frozen=True)
class Descriptors:
    """Open descriptors of one process."""

    connections: list[tuple[int, int]]  # TCP: the port at this end, and that at the other (0: it listens)
    lost: int  # sockets that are connected no more
    others: int
    children: int  # processes that it has started, each at the other end of two of the others


def read_descriptors(pid: int) -> Descriptors:
    ports: dict[str, tuple[int, int]] = {}
    local = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            own, peer = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
            ports[f"socket:[{fields[9]}]"] = (own, peer)
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        local.add(f"socket:[{line.split()[6]}]")
    connections, lost, others = [], 0, 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target in ports:
                connections.append(ports[target])
            elif target.startswith("socket:") and target not in local:
                lost += 1
            else:
                others += 1
    return Descriptors(connections, lost, others, len(children(pid, "")))
