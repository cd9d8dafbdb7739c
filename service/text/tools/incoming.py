"""A region of a model's text as it comes, which the reader of a format takes call by call, value by value.

A reader is a generator of pieces, and of None where it needs more text to go on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from quire.service.text.pieces import CallArguments, Piece
from quire.service.text.reasoning.parser import find_marker
from quire.service.text.tools.call_heads import MAX_HEAD, JsonDepth
from quire.service.text.tools.protocol import Function

Functions = Mapping[str, Function]
T = TypeVar("T")
Steps = Generator[Piece | None, None, T]

SPACE = " \t\r\n"
_AHEAD = 64  # characters, more than are looked at and not taken
_WORD = re.compile(r"[\w.-]*")
_OPENING, _CLOSING = "[{(", "]})"


class NoCall(Exception):
    """What comes is no call, or the call that has begun does not go on as one."""


class Incoming:
    """The text that is there and not taken. What needs more waits for it, however it is cut."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False  # no more comes
        self.limit: int | None = MAX_HEAD  # on what comes before a call has begun
        self._taken = ""
        self.begun = False  # a call, in this region

    def enter(self) -> None:
        """Note that a region begins here."""
        self.limit = MAX_HEAD
        self._taken = ""
        self.begun = False

    def begin(self) -> None:
        """Note that a call has begun: what was taken is not given back. Raises NoCall."""
        if self.limit is not None and len(self._taken) > self.limit:
            raise NoCall
        self.begun = True
        self._taken = ""

    def give_back(self) -> None:
        """Undo what was taken of the region."""
        self.text, self._taken = self._taken + self.text, ""

    def take(self, length: int) -> str:
        taken, self.text = self.text[:length], self.text[length:]
        if not self.begun:
            self._taken += taken
        return taken

    def wait(self) -> Steps[None]:
        """Raises NoCall if nothing more comes, or too much has."""
        held = len(self._taken) + len(self.text)
        if self.ended or (not self.begun and self.limit is not None and held > self.limit + _AHEAD):
            raise NoCall
        yield None

    def space(self, characters: str = SPACE) -> Steps[None]:
        """Leave out white space."""
        while True:
            rest = self.text.lstrip(characters)
            self.take(len(self.text) - len(rest))
            if rest or self.ended:
                return
            yield from self.wait()

    def next(self) -> Steps[str]:
        """Return the next character without taking it; nothing: the text ends."""
        while not self.text and not self.ended:
            yield from self.wait()
        return self.text[:1]

    def comes(self, literal: str) -> Steps[bool]:
        """Return whether this text comes next, without taking it."""
        while not self.text.startswith(literal):
            if self.ended or not literal.startswith(self.text):
                return False
            yield from self.wait()
        return True

    def has(self, literal: str) -> Steps[bool]:
        """Take this text if it comes next."""
        found = yield from self.comes(literal)
        if found:
            self.take(len(literal))
        return found

    def need(self, literal: str) -> Steps[None]:
        if not (yield from self.has(literal)):
            raise NoCall

    def close(self, marker: str) -> Steps[None]:
        """Take the marker that ends a region. It may be cut, or a token that ends the answer."""
        yield from self.space()
        if (yield from self.has(marker)):
            return
        if not self.ended or not marker.startswith(self.text):
            raise NoCall
        self.take(len(self.text))

    def skip(self, marker: str) -> Steps[None]:
        """Leave out all up to a marker, and it; or all that comes."""
        while (at := self.text.find(marker)) < 0:
            self.take(max(0, len(self.text) - len(marker) + 1))
            if self.ended:
                self.text = ""
                return
            yield from self.wait()
        self.take(at + len(marker))

    def word(self) -> Steps[str]:
        """Take a name."""
        while True:
            found = _WORD.match(self.text)
            length = 0 if found is None else found.end()
            if length < len(self.text) or self.ended:
                return self.take(length)
            yield from self.wait()

    def upto(self, marker: str) -> Steps[str]:
        """Take what stands before a marker, and it."""
        looked = 0
        while (at := self.text.find(marker, looked)) < 0:
            looked = max(0, len(self.text) - len(marker) + 1)
            yield from self.wait()
        text = self.take(at)
        self.take(len(marker))
        return text

    def tell_object(self) -> Steps[None]:
        """Tell of a JSON object as the arguments that it is."""
        depth = JsonDepth()
        while not depth.closed:
            text = self.take(depth.read(self.text))
            if text:
                yield CallArguments(text)
            if not depth.closed:
                yield from self.wait()

    def rest_of_object(self, depth: JsonDepth) -> Steps[str]:
        parts = []
        while True:
            parts.append(self.take(depth.read(self.text)))
            if depth.closed:
                return "".join(parts)
            yield from self.wait()

    def tell_text(self, marker: str, *, lines: bool = False) -> Steps[None]:
        """Tell of the text up to a marker as a JSON string. lines: a line end stands between them."""
        yield CallArguments('"')
        while True:
            found = find_marker(self.text, (marker,), last=False)
            held = lines and not found.marker and self.text[: found.at].endswith("\n")
            text = self.take(found.at - held)
            text = text.removesuffix("\n") if lines and found.marker else text
            if text:
                yield CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if found.marker:
                self.take(len(marker))
                yield CallArguments('"')
                return
            yield from self.wait()

    def value(self, quotes: tuple[str, ...], stops: str) -> Steps[str]:
        """Take a value, up to one of `stops` outside of brackets and quotes. Longer quotes stand first."""
        at = depth = 0
        quote = ""
        while True:
            while at < len(self.text):
                marks = (quote,) if quote else quotes
                mark = self._mark_at(at, marks)
                if mark is None:
                    break
                if mark:
                    quote = "" if quote else mark
                    at += len(mark)
                elif quote:
                    at += 2 if self.text[at] == "\\" and len(quote) in (1, 3) else 1
                elif not depth and self.text[at] in stops:
                    return self.take(at)
                else:
                    depth += (self.text[at] in _OPENING) - (self.text[at] in _CLOSING)
                    at += 1
            yield from self.wait()

    def _mark_at(self, at: int, marks: tuple[str, ...]) -> str | None:
        """Return the first of `marks` that stands there, if any; None: it may be, once there is more."""
        for mark in marks:
            if self.text.startswith(mark, at):
                return mark
            if not self.ended and mark.startswith(self.text[at:]):
                return None
        return ""


class Told:
    """Arguments that are told of one by one, as the JSON object that they come to."""

    def __init__(self) -> None:
        self._before = "{"

    def key(self, name: str) -> CallArguments:
        before, self._before = self._before, ", "
        return CallArguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")

    def value(self, value: Any) -> CallArguments:
        text = json.dumps(value, ensure_ascii=False)
        # Python's "\ud83d\ude00" are two surrogates, which JSON's are one character.
        return CallArguments(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))

    def end(self) -> CallArguments:
        return CallArguments("}" if self._before == ", " else "{}")


def named(functions: Functions, name: str) -> Function:
    """Return the function of this name. Raises NoCall."""
    function = functions.get(name)
    if function is None:
        raise NoCall
    return function
