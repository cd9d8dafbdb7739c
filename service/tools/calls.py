"""The calls of one answer, as clients get them: as they come, or whole."""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from service.replies import ReplyFunction, ReplyToolCall
from service.tools.parser import CallArguments, CallStart


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType
    arguments: str


class CallDelta(msgspec.Struct):
    """What is new of call `index`; the first of it has its id and name."""

    index: int
    id: str | UnsetType
    type: Literal["function"] | UnsetType
    function: FunctionDelta


class AnswerCalls:
    """Collects what has come and not yet been taken."""

    __slots__ = ("_arguments", "_count", "_deltas")

    def __init__(self) -> None:
        self._count = 0
        self._deltas: list[CallDelta] = []
        self._arguments: list[str] = []  # of the latest delta

    def add(self, piece: CallStart | CallArguments) -> None:
        if isinstance(piece, CallStart):
            self._settle()
            self._count += 1
            delta = CallDelta(
                self._count - 1, f"call_{secrets.token_hex(12)}", "function", FunctionDelta(piece.name, "")
            )
            self._deltas.append(delta)
            return
        if not self._deltas:
            self._deltas.append(CallDelta(self._count - 1, UNSET, UNSET, FunctionDelta(UNSET, "")))
        self._arguments.append(piece.text)

    def _settle(self) -> None:
        if self._arguments:
            self._deltas[-1].function.arguments = "".join(self._arguments)
            self._arguments = []

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def take(self) -> list[CallDelta]:
        """At most one delta of each call."""
        self._settle()
        deltas, self._deltas = self._deltas, []
        return deltas


def whole_calls(deltas: list[CallDelta]) -> list[ReplyToolCall]:
    """Of an answer that nothing was taken of before."""
    return [
        ReplyToolCall(id=delta.id, function=ReplyFunction(name=function.name, arguments=function.arguments))
        for delta in deltas
        for function in [delta.function]
        if delta.id is not UNSET and function.name is not UNSET
    ]
