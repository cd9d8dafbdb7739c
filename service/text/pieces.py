"""The parts of a model's answer as they are told from its text."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Thought(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class CallStart(NamedTuple):
    name: str


class CallArguments(NamedTuple):
    """More of the latest call's arguments, as JSON text."""

    text: str


Piece = str | Thought | CallStart | CallArguments
"""Text that is the answer, thinking, the beginning of a call, or more of its arguments."""


class AnswerParser(Protocol):
    """Tells an answer's pieces apart as its text comes; what they are does not depend on how it is cut."""

    @property
    def num_calls(self) -> int:
        """Return how many calls have begun."""
        ...

    @property
    def done(self) -> bool:
        """Return whether nothing that follows is wanted: the only call that may be made has been."""
        ...

    @property
    def thinking(self) -> bool:
        """Return whether what comes next is thinking, as far as can be told."""
        ...

    @property
    def plain(self) -> bool:
        """Return whether all that follows is text."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that `text` settles."""
        ...

    def finish(self) -> list[Piece]:
        """Return the pieces that are left when no more text comes."""
        ...
