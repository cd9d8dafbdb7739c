"""Markdown on a terminal while it comes: whole blocks for good, the last one drawn again and again."""

from __future__ import annotations

import re
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

_DRAWN_PER_SECOND = 10
_FENCE = re.compile(r" {0,3}(```|~~~)")


def split_whole(text: str) -> tuple[str, str]:
    """Return the blocks of `text` that what comes cannot change, and the rest."""
    fence: str | None = None
    at = whole = 0
    for line in text.splitlines(keepends=True):
        at += len(line)
        found = _FENCE.match(line)
        if found and fence is None:
            fence = found[1]
        elif found and found[1] == fence:
            fence = None
        elif fence is None and not line.strip() and line.endswith("\n"):
            whole = at
    return text[:whole], text[whole:]


class MarkdownPrinter:
    """A context in which `add` takes an answer's pieces."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._printed = False
        self._live = Live(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=_DRAWN_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        rest, self._rest = self._rest, ""
        self._live.stop()
        self._print(rest)

    def add(self, piece: str) -> None:
        whole, self._rest = split_whole(self._rest + piece)
        self._print(whole)

    def _print(self, blocks: str) -> None:
        if blocks.strip():
            if self._printed:
                self._console.print()
            self._console.print(Markdown(blocks))
            self._printed = True

    def _draw(self) -> Markdown | Text:
        rest = self._rest
        if not rest.strip():
            return Text("" if self._printed else "…", style="dim")
        return Markdown(rest)
