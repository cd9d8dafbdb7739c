"""Whether a rank's process goes on, by looks at it: stopped, or asleep while the others wait for it."""

from __future__ import annotations

from pathlib import Path

STOPPED_LOOKS = 2  # in sequence; a whole that was stopped and goes on has one
ASLEEP_LOOKS = 6
TICKS = 2  # of processor time between two looks, which threads in the background may take


class Pulse:
    """What looks at one process have seen."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        self._stopped = 0
        self._asleep = 0
        self._ticks = 0

    def look(self, *, owes: bool) -> str | None:
        """Return why the process hangs, if it does; None too if it has ended.

        owes: the others wait for what it has been told to do. A process that computes or has a program run,
        a compiler for one, goes on.
        """
        try:
            fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
            state, ticks = fields[0], int(fields[11]) + int(fields[12])
            is_asleep = state == "S" and ticks <= self._ticks + TICKS and not self._has_children()
        except OSError:
            return None
        self._ticks = ticks
        self._stopped = self._stopped + 1 if state == "T" else 0
        self._asleep = self._asleep + 1 if owes and is_asleep else 0
        if self._stopped >= STOPPED_LOOKS:
            return "its process was stopped"
        if self._asleep >= ASLEEP_LOOKS:
            return "its process sleeps, and the others wait for it"
        return None

    def _has_children(self) -> bool:
        return any(path.read_text() for path in self._proc.glob("task/*/children"))
