"""gpt-oss's Harmony: messages on channels, of which one is thinking, one the answer, and one has calls.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto

from quire.service.text.pieces import CallArguments, CallStart, Piece, Thought
from quire.service.text.reasoning.formats import HARMONY
from quire.service.text.reasoning.parser import find_marker

MAX_HEAD = 1024  # characters before a message
_MESSAGE = "<|message|>"
_ENDS = (*HARMONY.ends, "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class _State(Enum):
    HEAD = auto()  # of a message
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyParser:
    """Text without channels is the answer. Calls of others than `names` are text."""

    def __init__(self, names: frozenset[str] = frozenset(), *, parallel: bool = True) -> None:
        self._names = names
        self._parallel = parallel
        self._state = _State.HEAD
        self._buffer = ""
        self._has_thought = False
        self._separated = True  # this message's thinking, from that of the one before
        self.num_calls = 0
        self.done = False

    @property
    def thinking(self) -> bool:
        return self._state is _State.THOUGHT or (self._state is _State.HEAD and not self.num_calls)

    @property
    def plain(self) -> bool:
        return False

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that `text` settles."""
        self._buffer += text
        return list(self._read(last=False))

    def finish(self) -> list[Piece]:
        """Return the pieces that are left when no more text comes."""
        return list(self._read(last=True))

    def _read(self, *, last: bool) -> Iterator[Piece]:
        while not self.done:
            before = (self._state, len(self._buffer))
            yield from self._head(last) if self._state is _State.HEAD else self._body(last)
            if before == (self._state, len(self._buffer)):
                return

    def _head(self, last: bool) -> Iterator[Piece]:
        start = self._buffer.lstrip()
        marked = start.startswith("<|") or (not last and "<|".startswith(start))
        end = self._buffer.find(_MESSAGE)
        if not marked or end > MAX_HEAD or (end < 0 and len(self._buffer) > MAX_HEAD + len(_MESSAGE)):
            self._state = _State.TEXT
            text, self._buffer = self._buffer[:1], self._buffer[1:]  # or it would be read as a head again
            if text:
                yield text
        elif end >= 0:
            head, self._buffer = self._buffer[:end], self._buffer[end + len(_MESSAGE) :]
            yield from self._begin(head)
        elif last:
            self._buffer = ""  # a head that nothing follows

    def _begin(self, head: str) -> Iterator[Piece]:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and recipient.group(1) in self._names:
            self._state = _State.CALL
            self.num_calls += 1
            yield CallStart(recipient.group(1))
        elif recipient is None and channel is not None and channel.group(1) == "analysis":
            self._state = _State.THOUGHT
            self._separated = not self._has_thought
        else:
            self._state = _State.TEXT

    def _body(self, last: bool) -> Iterator[Piece]:
        found = find_marker(self._buffer, _ENDS, last)
        text, self._buffer = self._buffer[: found.at], self._buffer[found.at :]
        if text:
            yield self._piece(text)
        if not found.marker:
            return
        if found.marker != "<|start|>":
            self._buffer = self._buffer[len(found.marker) :]
        self.done = self._state is _State.CALL and not self._parallel
        self._state = _State.HEAD

    def _piece(self, text: str) -> Piece:
        if self._state is _State.CALL:
            return CallArguments(text)
        if self._state is _State.TEXT:
            return text
        separated, self._separated, self._has_thought = self._separated, True, True
        return Thought(text if separated else f"\n{text}")
