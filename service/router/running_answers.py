"""The answers that run on a WebSocket of completions or chat, as frames tell on the way through."""

from __future__ import annotations

import msgspec

from quire.service.api.sockets.frames import Head, Tail, failed, heads, tails
from quire.service.errors import ApiError
from quire.service.router.endings import outcome_of_end
from quire.service.router.failures import Outcome


class RunningAnswers:
    """Each was asked for, and has not ended; if its replica is lost, nobody but the router can end it."""

    def __init__(self) -> None:
        self._tags: dict[str, None] = {}  # in order
        self._untagged = 0

    def __len__(self) -> int:
        return len(self._tags) + self._untagged

    def asks(self, text: str | None) -> bool:
        """Return whether a client's frame, None if it is a binary one, is answered."""
        return not _head(text).cancels

    def ask(self, text: str | None) -> None:
        """Note that it is passed on."""
        head = _head(text)
        if head.cancels:
            return
        tag = head.readable_tag()
        if tag is None:
            self._untagged += 1
        else:
            self._tags[tag] = None

    def refusal(self, text: str | None, error: ApiError) -> str:
        return failed(error, _head(text).readable_tag()).decode()

    def note(self, text: str) -> Outcome | None:
        """Note that a server's frame was passed on. Return how an answer ended with it; None: none has."""
        tail = _tail(text)
        if not tail.ends:
            return None
        if tail.tag is None:
            self._untagged = max(0, self._untagged - 1)
        else:
            self._tags.pop(tail.tag, None)
        return outcome_of_end(text.encode())

    def fail(self, error: ApiError) -> list[str]:
        """Return the last frame of each, as its replica would have told it; none runs any more."""
        ends = [failed(error, tag).decode() for tag in (*self._tags, *[None] * self._untagged)]
        self._tags.clear()
        self._untagged = 0
        return ends

    def lose(self, error: ApiError) -> list[str]:
        return self.fail(error)


def _head(text: str | None) -> Head:
    try:
        return Head() if text is None else heads.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Head()


def _tail(text: str) -> Tail:
    """Return by what a frame ends an answer, if it does.

    What is inside a JSON string has its quotes escaped: few frames are more than looked through.
    """
    if '"done":' not in text and '"error":' not in text:
        return Tail()
    try:
        return tails.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Tail()
