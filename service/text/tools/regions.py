"""Calls that are read once all of a region is there: lists, XML, Python and others, between markers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from quire.service.text.pieces import CallArguments, CallStart, Piece
from quire.service.text.reasoning.parser import find_marker
from quire.service.text.tools.lark import TokenOf, free_text, literal
from quire.service.text.tools.protocol import Function

MAX_HEAD = 1024  # characters of a region before its first bracket
_SPACE = " \t\r\n;,"  # around calls without markers
_OPENING, _CLOSING = "[{(", "]})"


class Call(NamedTuple):
    name: str
    arguments: str  # JSON text


Functions = Mapping[str, Function]
Reader = Callable[[str, Functions], list[Call] | None]
"""The calls in a region; None if it is something else."""
Writer = Callable[[Sequence[Function], TokenOf, bool, bool], list[str]]
"""The rules of a grammar of a region, from `region` on, after its begin. The flags: whether all arguments
must fit, and whether it may have several calls."""


@dataclass(frozen=True)
class RegionFormat:
    """A region begins after one of `begins`, the first of which is written; and ends by `end`.

    Without an `end` its brackets balance. Without `begins` it can only come first, by its bracket.
    """

    begins: tuple[str, ...]
    end: str
    read: Reader
    write: Writer
    around: tuple[str, ...] = ()  # regions; left out of the text
    within: tuple[str, ...] = ()  # regions, markers that may be tokens
    repeats: bool = True  # a region has one call, and another may follow
    between: str = "\n"  # two regions

    @property
    def begin(self) -> str:
        return self.begins[0] if self.begins else ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that must be seen even where special ones are skipped."""
        return tuple(filter(None, (*self.begins, self.end, *self.around, *self.within)))

    def must_call(self, functions: Sequence[Function], token_of: TokenOf, *, parallel: bool) -> str:
        """The rules of a grammar of one call, or of one or more if `parallel`."""
        one = f"{literal(self.begin, token_of)} region" if self.begin else "region"
        more = f" ({literal(self.between, token_of)} {one})*" if parallel and self.repeats else ""
        first, last = ("", "") if len(self.around) < 2 or not self.begin else self.around
        start = f"start: {literal(first, token_of)} {one}{more} {literal(last, token_of)}"
        return "\n".join([start, *self.write(functions, token_of, True, parallel)]) + "\n"

    def may_call(self, functions: Sequence[Function], token_of: TokenOf, *, parallel: bool) -> str:
        """The rules of a grammar of any text, in which calls are right."""
        rules = self.write(functions, token_of, False, parallel)
        if not self.begin:
            return "\n".join(["start: region | TEXT", r"TEXT: /([^\[{\s](.|\n)*)?/", *rules]) + "\n"
        repeated = parallel and self.repeats
        free = free_text(self.begin, "region", token_of, repeated=repeated, others=self.around)
        return "\n".join([*free, *rules]) + "\n"


class _State(Enum):
    TEXT = auto()
    REGION = auto()


class RegionParser:
    """Tells calls of `functions` from text. What only looks like a call stays text, to the last character.

    White space around calls is not part of the text.
    """

    thinking = False
    plain = False

    def __init__(self, form: RegionFormat, functions: Functions, *, parallel: bool) -> None:
        self._form = form
        self._functions = functions
        self._parallel = parallel
        self._state = _State.TEXT
        self._buffer = ""
        self._before = ""  # white space that is text only if text follows it
        self._lead = ""  # what stood before the region that is being read
        self._fresh = True  # only calls have come, and white space
        self._end = _End(form.end)
        self.num_calls = 0
        self.done = False

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` settles."""
        self._buffer += text
        return list(self._read(last=False))

    def finish(self) -> list[Piece]:
        """The pieces that are left when no more text comes."""
        pieces = list(self._read(last=True))
        if not self.num_calls and self._before:
            pieces.append(self._before)
        self._before = ""
        return pieces

    def _read(self, *, last: bool) -> Iterator[Piece]:
        while not self.done:
            before = (self._state, len(self._buffer))
            yield from self._text(last) if self._state is _State.TEXT else self._region(last)
            if before == (self._state, len(self._buffer)):
                return

    def _text(self, last: bool) -> Iterator[Piece]:
        if not self._form.begins:
            yield from self._bare(last)
            return
        found = find_marker(self._buffer, (*self._form.begins, *self._form.around), last)
        text, self._buffer = self._buffer[: found.at], self._buffer[found.at + len(found.marker) :]
        yield from self._say(text)
        if found.marker in self._form.begins:
            self._enter(found.marker)

    def _bare(self, last: bool) -> Iterator[Piece]:
        """Without a marker a region is what begins with a bracket, where only calls have come."""
        start = _bare_start(self._buffer, self._form.around) if self._fresh else self._buffer
        if self._fresh and start[:1] in ("[", "{"):
            lead = self._buffer[: len(self._buffer) - len(start)]
            self._buffer = start
            self._enter(lead)
        elif last or not self._fresh or not any(each.startswith(start) for each in ("", *self._form.around)):
            text, self._buffer = self._buffer, ""
            yield from self._say("" if self.num_calls and not start else text)

    def _enter(self, lead: str) -> None:
        self._lead = lead
        self._end = _End(self._form.end)
        self._state = _State.REGION

    def _say(self, text: str) -> Iterator[Piece]:
        """White space waits for what follows it."""
        text = self._before + text
        shown = text.rstrip()
        self._before = text[len(shown) :]
        if shown:
            self._fresh = False
            yield shown

    def _region(self, last: bool) -> Iterator[Piece]:
        size = self._end.find(self._buffer)
        if size is None:
            if not last:
                return
            size = len(self._buffer)  # the end may be a token that ends the answer
        region = self._buffer[:size]
        calls = None if size < 0 else self._form.read(region.removesuffix(self._form.end), self._functions)
        if not calls or any(call.name not in self._functions for call in calls):
            self._state = _State.TEXT
            lead, self._lead = self._lead, ""
            self._fresh = False
            yield from self._say(lead)
            return
        self._buffer = self._buffer[size:]
        self._state = _State.TEXT
        self._lead = self._before = ""
        for call in calls if self._parallel else calls[:1]:
            self.num_calls += 1
            yield CallStart(call.name)
            yield CallArguments(call.arguments)
        self.done = not self._parallel


def _bare_start(text: str, around: tuple[str, ...]) -> str:
    """Return what follows the white space and the markers at the beginning."""
    start = text.lstrip(_SPACE)
    while marker := next((each for each in around if start.startswith(each)), ""):
        start = start[len(marker) :].lstrip(_SPACE)
    return start


class _End:
    """Where a region ends; what was looked through is not looked through again."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._at = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._opened = False

    def find(self, text: str) -> int | None:
        """Return how long the region at the beginning of `text` is; None: longer; -1: it is none."""
        if self._marker:
            at = text.find(self._marker, max(0, self._at - len(self._marker)))
            self._at = len(text)
            return None if at < 0 else at + len(self._marker)
        if not self._opened:
            start = len(text) - len(text.lstrip())
            first = text[start : start + 1]
            at = start if first == "[" else text.find("{", 0, MAX_HEAD)
            if not first or at < 0:
                return -1 if len(text) >= MAX_HEAD else None
            self._at, self._opened = at, True
        return self._balance(text)

    def _balance(self, text: str) -> int | None:
        while self._at < len(text):
            character = text[self._at]
            self._at += 1
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = character == "\\"
                if character == self._quote:
                    self._quote = ""
            elif character == '"' or (character == "'" and not self._is_apostrophe(text)):
                self._quote = character
            elif character in _OPENING:
                self._depth += 1
            elif character in _CLOSING:
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return None

    def _is_apostrophe(self, text: str) -> bool:
        """Outside of strings only Python has single quotes, and after a letter or digit they are none."""
        return self._at >= 2 and text[self._at - 2].isalnum()
