"""Complaints about the registry: each is logged once."""

from __future__ import annotations

import logging
from collections import OrderedDict

log = logging.getLogger("quire.router")

MAX_REMEMBERED = 1024
_LOGGED = 500  # characters


class Complaints:
    """One line about each thing, for as long as it is among the last of many."""

    def __init__(self) -> None:
        self._made: OrderedDict[str, None] = OrderedDict()

    def make(self, level: int, about: str, message: str) -> None:
        """`message` may hold what others wrote: it stays one line of bounded length."""
        if about in self._made:
            self._made.move_to_end(about)
            return
        self._made[about] = None
        if len(self._made) > MAX_REMEMBERED:
            self._made.popitem(last=False)
        log.log(level, "%s", message[:_LOGGED].encode("unicode_escape").decode())
