"""The parts of one answer, as clients get them: text, thinking and calls, as they come or whole."""

from __future__ import annotations

import secrets
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from quire.service.text.pieces import CallArguments, CallStart, Piece, Thought


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType
    arguments: str


class CallDelta(msgspec.Struct):
    """The news of call `index`; the first of them has its id and name."""

    index: int
    id: str | UnsetType
    type: Literal["function"] | UnsetType
    function: FunctionDelta


Part = str | Thought | CallDelta


class Apart(NamedTuple):
    """What has come, by its kind."""

    text: str
    thinking: str
    calls: list[CallDelta]


class AnswerParts:
    """Collects what has come of an answer and not yet been taken: text, thinking and calls, in order."""

    __slots__ = ("_count", "_parts", "_texts")

    def __init__(self) -> None:
        self._count = 0  # calls
        self._parts: list[Part] = []
        self._texts: list[str] = []  # of the latest part: text, thinking or arguments

    def add(self, piece: Piece) -> None:
        match piece:
            case str():
                if not self._parts or not isinstance(self._parts[-1], str):
                    self._begin("")
                self._texts.append(piece)
            case Thought(text):
                if not self._parts or not isinstance(self._parts[-1], Thought):
                    self._begin(Thought(""))
                self._texts.append(text)
            case CallStart(name):
                identity = f"call_{secrets.token_hex(12)}"
                self._begin(CallDelta(self._count, identity, "function", FunctionDelta(name, "")))
                self._count += 1
            case CallArguments(text):
                if not self._parts:  # its beginning has been taken
                    self._begin(CallDelta(self._count - 1, UNSET, UNSET, FunctionDelta(UNSET, "")))
                self._texts.append(text)

    def _begin(self, part: Part) -> None:
        self._settle()
        self._parts.append(part)

    def _settle(self) -> None:
        if not self._texts:
            return
        text, self._texts = "".join(self._texts), []
        last = self._parts[-1]
        if isinstance(last, str):
            self._parts[-1] = text
        elif isinstance(last, Thought):
            self._parts[-1] = Thought(text)
        else:
            last.function.arguments = text

    def __bool__(self) -> bool:
        return bool(self._parts)

    def take(self) -> list[Part]:
        """Return what has come: at most one delta of each call, and no texts that follow one another."""
        self._settle()
        parts, self._parts = self._parts, []
        return parts

    def take_apart(self) -> Apart:
        """Return all the text, all the thinking, and the calls."""
        parts = self.take()
        return Apart(
            "".join(part for part in parts if isinstance(part, str)),
            "".join(part.text for part in parts if isinstance(part, Thought)),
            [part for part in parts if isinstance(part, CallDelta)],
        )


class ReplyFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ReplyToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: ReplyFunction


def object_of(arguments: str) -> dict[str, Any] | None:
    """Return a call's arguments; None if they are no JSON object, as where an answer was cut."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def whole_calls(deltas: list[CallDelta]) -> list[ReplyToolCall]:
    """Return the calls of an answer from which nothing was taken before."""
    return [
        ReplyToolCall(id=delta.id, function=ReplyFunction(name=function.name, arguments=function.arguments))
        for delta in deltas
        for function in [delta.function]
        if delta.id is not UNSET and function.name is not UNSET
    ]
