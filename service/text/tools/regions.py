"""Calls between markers, each format's read by its own reader: lists, XML, Python and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.service.text.pieces import CallStart, Piece
from quire.service.text.reasoning.parser import find_marker
from quire.service.text.tools.call_heads import may_begin_as_call
from quire.service.text.tools.incoming import Functions, Incoming, NoCall, Steps
from quire.service.text.tools.lark import TokenOf, free_text, literal
from quire.service.text.tools.protocol import Function

_SPACE = " \t\r\n"

Reader = Callable[[Incoming, Functions], Steps[None]]
"""Tells of the calls in a region, up to its end. Raises NoCall if it is something else."""
Writer = Callable[[Sequence[Function], TokenOf, bool, bool], list[str]]
"""The rules of a grammar of a region, from `region` on, after its begin. The flags: whether all arguments
must fit, and whether it may have several calls."""


@dataclass(frozen=True)
class RegionFormat:
    """A region begins after one of `begins`, the first of which is written; and ends by `end`.

    Without an `end` it is for `read` to tell. Without `begins` it can only come first, by one of `brackets`.
    """

    begins: tuple[str, ...]
    end: str
    read: Reader
    write: Writer
    around: tuple[str, ...] = ()  # regions; left out of the text
    within: tuple[str, ...] = ()  # regions, markers that may be tokens
    repeats: bool = True  # a region has one call, and another may follow
    between: str = "\n"  # two regions
    brackets: str = "[{"
    tag: str = ""  # which may stand before a bracket
    apart: str = ";,"  # what stands between calls without markers, beside white space

    @property
    def begin(self) -> str:
        return self.begins[0] if self.begins else ""

    @property
    def opening(self) -> tuple[str, ...]:
        """Return what stands before calls, and ends thinking."""
        return (*self.around[:1], *self.begins)

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the tokens that must be seen even where special ones are skipped."""
        return tuple(filter(None, (*self.begins, self.end, *self.around, *self.within)))

    @property
    def written_begins(self) -> tuple[str, ...]:
        """Return what written calls begin with; nothing: documents may begin so, too."""
        if self.begin:
            return (*self.around[:1], self.begin)
        return () if self._writes_objects else (self.brackets[0],)

    @property
    def _writes_objects(self) -> bool:
        return not self.begin and self.brackets[0] == "{"

    def tells_from_calls(self, schema: dict[str, Any]) -> bool:
        """Return whether a document of this schema never reads as a call."""
        if self.begin:
            return True
        is_object = schema.get("type") == "object"
        return is_object and not (self._writes_objects and may_begin_as_call(schema))

    def must_call(self, functions: Sequence[Function], token_of: TokenOf, *, parallel: bool) -> str:
        """Return the rules of a grammar of one call, or of one or more if `parallel`."""
        rules = self.write(functions, token_of, True, parallel)
        return "\n".join([f"start: {self._calls_alone(token_of, parallel)}", *rules]) + "\n"

    def call_or_document(
        self, functions: Sequence[Function], token_of: TokenOf, *, parallel: bool, document: str
    ) -> str:
        """Return the rules of a grammar of calls alone, which are right, or of a document."""
        rules = [f"document: {document}", *self.write(functions, token_of, False, parallel)]
        return "\n".join([f"start: {self._calls_alone(token_of, parallel)} | document", *rules]) + "\n"

    def _calls_alone(self, token_of: TokenOf, parallel: bool) -> str:
        one = f"{literal(self.begin, token_of)} region" if self.begin else "region"
        more = f" ({literal(self.between, token_of)} {one})*" if parallel and self.repeats else ""
        first, last = ("", "") if len(self.around) < 2 or not self.begin else self.around
        return f"{literal(first, token_of)} {one}{more} {literal(last, token_of)}"

    def may_call(self, functions: Sequence[Function], token_of: TokenOf, *, parallel: bool) -> str:
        """Return the rules of a grammar of any text, in which calls are right."""
        rules = self.write(functions, token_of, False, parallel)
        if not self.begin:
            other = self.brackets.replace("[", r"\[")
            return "\n".join(["start: region | TEXT", rf"TEXT: /([^{other}\s](.|\n)*)?/", *rules]) + "\n"
        repeated = parallel and self.repeats
        free = free_text(self.begin, "region", token_of, repeated=repeated, others=self.around)
        return "\n".join([*free, *rules]) + "\n"


class RegionParser:
    """Tells calls of `functions` from text. What only looks like a call stays text, to the last character.

    A call is told of once its arguments begin, and they are as they come: one that then breaks off stays
    incomplete. White space around calls is not part of the text.
    """

    thinking = False
    plain = False

    def __init__(self, form: RegionFormat, functions: Functions, *, parallel: bool) -> None:
        self._form = form
        self._functions = functions
        self._parallel = parallel
        self._incoming = Incoming()
        self._region: Steps[None] | None = None  # that is being read
        self._before = ""  # white space that is text only if text follows it
        self._lead = ""  # what stood before the region that is being read
        self._fresh = True  # only calls have come, and white space
        self.num_calls = 0
        self.done = False

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that `text` settles."""
        self._incoming.text += text
        return list(self._read())

    def finish(self) -> list[Piece]:
        """Return the pieces that are left when no more text comes."""
        self._incoming.ended = True
        pieces = list(self._read())
        if not self.num_calls and self._before:
            pieces.append(self._before)
        self._before = ""
        return pieces

    def _read(self) -> Iterator[Piece]:
        while not self.done:
            before = (self._region, len(self._incoming.text))
            yield from self._text() if self._region is None else self._calls(self._region)
            if before == (self._region, len(self._incoming.text)):
                return

    def _text(self) -> Iterator[Piece]:
        incoming = self._incoming
        if not self._form.begins:
            yield from self._bare()
            return
        found = find_marker(incoming.text, (*self._form.begins, *self._form.around), incoming.ended)
        text, incoming.text = incoming.text[: found.at], incoming.text[found.at + len(found.marker) :]
        yield from self._say(text)
        if found.marker in self._form.begins:
            self._enter(found.marker)

    def _bare(self) -> Iterator[Piece]:
        """Without a marker a region is what begins with a bracket, where only calls have come."""
        text, around = self._incoming.text, (*self._form.around, self._form.tag)
        start = _bare_start(text, around, _SPACE + self._form.apart) if self._fresh else text
        if self._fresh and start and start[0] in self._form.brackets:
            self._incoming.text = start
            self._enter(text[: len(text) - len(start)])
        elif self._incoming.ended or not self._fresh or not any(each.startswith(start) for each in around):
            self._incoming.text = ""
            yield from self._say("" if self.num_calls and not start else text)

    def _enter(self, lead: str) -> None:
        self._lead = lead
        self._incoming.enter()
        self._region = self._whole_region()

    def _whole_region(self) -> Steps[None]:
        yield from self._form.read(self._incoming, self._functions)
        if self._form.end:
            yield from self._incoming.close(self._form.end)

    def _say(self, text: str) -> Iterator[Piece]:
        """White space waits for what follows it."""
        text = self._before + text
        shown = text.rstrip()
        self._before = text[len(shown) :]
        if shown:
            self._fresh = False
            yield shown

    def _calls(self, region: Steps[None]) -> Iterator[Piece]:
        incoming, end = self._incoming, self._form.end
        try:
            for piece in region:
                if piece is None:
                    return
                if isinstance(piece, CallStart):
                    if self.num_calls and not self._parallel:
                        self.done = True
                        return
                    incoming.begin()
                    self._lead = self._before = ""
                    self.num_calls += 1
                yield piece
            self._region = None
        except NoCall:  # what stands before the end of a call that broke off is of no use
            self._region = incoming.skip(end) if incoming.begun and end else None
        if self._region is None and incoming.begun:
            self.done = not self._parallel
        elif self._region is None:
            incoming.give_back()
            lead, self._lead = self._lead, ""
            self._fresh = False
            yield from self._say(lead)


def _bare_start(text: str, around: tuple[str, ...], space: str) -> str:
    """Return what follows the characters of `space` and the markers at the beginning."""
    start = text.lstrip(space)
    while marker := next((each for each in around if each and start.startswith(each)), ""):
        start = start[len(marker) :].lstrip(space)
    return start
