"""The start-up phases on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from quire.engine import config


class PhaseBars:
    """One bar a phase, on stderr; plain lines where that is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}

    def show(self, event: config.Progress) -> None:
        """Take in one event; "ready" ends the display."""
        if event.phase == "ready":
            self.stop()
            self._console.print(Text(f"     ready   after {event.seconds:.1f} s", style="green"))
            return
        if not self._console.is_terminal:
            if event.done == event.total:
                self._console.print(f"{event.phase}: {_amount(event)} ({event.seconds:.1f} s)")
            return
        self._bars.start()
        if event.phase not in self._tasks:
            self._tasks[event.phase] = self._bars.add_task(event.phase, amount="")
        self._bars.update(
            self._tasks[event.phase],
            completed=event.done,
            total=max(event.total, 1),
            amount=_amount(event),
        )

    def stop(self) -> None:
        """Leave the bars as they are; later events start them again."""
        if self._console.is_terminal:  # elsewhere the library would print an empty line
            self._bars.stop()


def _amount(event: config.Progress) -> str:
    if event.unit == "B":
        return f"{event.done / 1e6:,.1f} of {event.total / 1e6:,.1f} MB"
    return f"{event.done:,} of {event.total:,} {event.unit}"
