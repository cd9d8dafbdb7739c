"""Thinking told from the answer in a model's text as it comes: how the text is cut changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from quire.service.text.pieces import AnswerParser, Piece, Thought
from quire.service.text.reasoning.formats import ReasoningFormat


class _State(Enum):
    BEGINNING = auto()  # thinking may begin here
    THINKING = auto()
    ANSWER = auto()


class Found(NamedTuple):
    """In a text: where a marker stands, or how much at the end may become one."""

    at: int
    marker: str  # empty if none is there


class ThinkingParser:
    """Line ends around thinking belong to neither it nor the answer. A tool call ends thinking, too."""

    def __init__(
        self,
        form: ReasoningFormat,
        *,
        inside: bool,
        tools: AnswerParser | None = None,
        calls: tuple[str, ...] = (),
    ) -> None:
        """inside: the prompt has begun the thinking. `tools` reads the answer; `calls` begin calls."""
        self._form = form
        self._begun = inside or form.always
        self._tools = tools
        self._ends = (*form.ends, *calls)
        self._calls = calls
        self._state = _State.BEGINNING
        self._buffer = ""
        self._before = ""  # line ends that are thinking only if more of it follows
        self._fresh = True  # no thinking was told of, or none of the answer
        self._has_thought = False

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    @property
    def done(self) -> bool:
        return self._tools is not None and self._tools.done

    @property
    def thinking(self) -> bool:
        return self._state is _State.THINKING or (self._state is _State.BEGINNING and self._begun)

    @property
    def plain(self) -> bool:
        return (
            self._state is _State.ANSWER
            and self._tools is None
            and not (self._form.around or self._buffer)
            and not (self._fresh and self._has_thought)
        )

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that `text` settles."""
        self._buffer += text
        return list(self._read(last=False))

    def finish(self) -> list[Piece]:
        """Return the pieces that are left when no more text comes."""
        pieces = list(self._read(last=True))
        return pieces if self._tools is None else pieces + self._tools.finish()

    def _read(self, *, last: bool) -> Iterator[Piece]:
        if self._state is _State.BEGINNING:
            self._begin(last)
        if self._state is _State.THINKING:
            yield from self._think(last)
        if self._state is _State.ANSWER:
            yield from self._answer(last)

    def _begin(self, last: bool) -> None:
        start = self._buffer.lstrip()
        begin = next((each for each in self._form.begins if start.startswith(each)), None)
        if begin is not None:
            self._buffer = start[len(begin) :]
            self._state = _State.THINKING
        elif last or not any(each.startswith(start) for each in self._form.begins):
            self._state = _State.THINKING if self._begun else _State.ANSWER

    def _think(self, last: bool) -> Iterator[Piece]:
        self._has_thought = True
        found = find_marker(self._buffer, self._ends, last)
        text, self._buffer = self._buffer[: found.at], self._buffer[found.at :]
        yield from self._tell_thought(text)
        if found.marker:
            if found.marker not in self._calls:
                self._buffer = self._buffer[len(found.marker) :]
            self._before = ""
            self._fresh = True
            self._state = _State.ANSWER

    def _tell_thought(self, text: str) -> Iterator[Piece]:
        text = self._before + text
        if self._fresh:
            text = text.lstrip("\n")
        shown = text.rstrip("\n")
        self._before = text[len(shown) :]
        if shown:
            self._fresh = False
            yield Thought(shown)

    def _answer(self, last: bool) -> Iterator[Piece]:
        while True:
            found = find_marker(self._buffer, self._form.around, last)
            text, self._buffer = self._buffer[: found.at], self._buffer[found.at + len(found.marker) :]
            yield from self._tell_answer(text, last and not found.marker)
            if not found.marker:
                return

    def _tell_answer(self, text: str, last: bool) -> Iterator[Piece]:
        if self._fresh and self._has_thought:
            text = text.lstrip("\n")
        if self._form.around:  # line ends before the marker that closes the answer
            text = self._before + text
            shown = text if last and not self._has_thought else text.rstrip("\n")
            self._before = text[len(shown) :]
            text = shown
        if text:
            self._fresh = False
            yield from [text] if self._tools is None else self._tools.push(text)


class WithoutThinking:
    """Tells what another parser does, but for the thinking."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def done(self) -> bool:
        return self._parser.done

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    @property
    def plain(self) -> bool:
        return self._parser.plain

    def push(self, text: str) -> list[Piece]:
        return [piece for piece in self._parser.push(text) if not isinstance(piece, Thought)]

    def finish(self) -> list[Piece]:
        return [piece for piece in self._parser.finish() if not isinstance(piece, Thought)]


def find_marker(text: str, markers: tuple[str, ...], last: bool) -> Found:
    """Look for the first of `markers`; `last`: nothing follows."""
    places = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if places:
        at, _, marker = min(places)
        return Found(at, marker)
    if last or not markers:
        return Found(len(text), "")
    longest, firsts = _shape(markers)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if text[at] in firsts and any(marker.startswith(text[at:]) for marker in markers):
            return Found(at, "")
    return Found(len(text), "")


@lru_cache(maxsize=64)
def _shape(markers: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """Return the longest one's length, and what they begin with."""
    return max(map(len, markers)), frozenset(marker[0] for marker in markers)
