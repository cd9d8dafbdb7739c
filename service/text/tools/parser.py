"""Tool calls in a model's text as it comes, in pieces of any length: the result does not depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from quire.service.text.pieces import CallArguments, CallStart, Piece
from quire.service.text.tools.call_heads import MAX_HEAD, Head, JsonDepth, decode_call, match_head
from quire.service.text.tools.formats import ToolFormat


class _State(Enum):
    TEXT = auto()
    HEAD = auto()  # within what may be a call, before its arguments
    WHOLE = auto()  # what may be a call in another order is read as a whole
    ARGUMENTS = auto()
    CLOSING = auto()


class ToolCallParser:
    """Tells calls of `names` from text. What only looks like a call stays text, to the last character.

    A call is told of as soon as its arguments begin. White space around calls is not part of the text.
    """

    thinking = False
    plain = False

    def __init__(self, form: ToolFormat, names: frozenset[str], *, parallel: bool) -> None:
        self._form = form
        self._names = names
        self._parallel = parallel
        self._state = _State.TEXT
        self._buffer = ""
        self._before = ""  # white space that is text only if text follows it
        self._lead = ""  # what stood before the head that is being read
        self._fresh = True  # only calls have come, and white space
        self._depth = JsonDepth()
        self.num_calls = 0
        self.done = False  # the only call that may be made has been

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` settles."""
        self._buffer += text
        return self._read(last=False)

    def finish(self) -> list[Piece]:
        """The pieces that are left when no more text comes."""
        pieces = self._read(last=True)
        if not self.num_calls and self._before:
            pieces.append(self._before)
        self._before = ""
        return pieces

    def _read(self, *, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while not self.done:
            before = (self._state, len(self._buffer))
            for piece in self._advance(last):
                if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
                    pieces[-1] += piece
                else:
                    pieces.append(piece)
            if before == (self._state, len(self._buffer)):
                break
        return pieces

    def _advance(self, last: bool) -> Iterator[Piece]:
        match self._state:
            case _State.TEXT:
                return self._text(last)
            case _State.HEAD:
                return self._head(last)
            case _State.WHOLE:
                return self._whole(last)
            case _State.ARGUMENTS:
                return self._arguments()
            case _State.CLOSING:
                return self._closing()

    def _text(self, last: bool) -> Iterator[Piece]:
        found = self._form.find(self._buffer, self._fresh, last)
        if found.text:
            yield from self._say(self._buffer[: found.text])
        if found.call is not None:
            self._lead = self._buffer[found.text : found.call]
            self._state = _State.HEAD
        self._buffer = self._buffer[found.text if found.call is None else found.call :]

    def _say(self, text: str) -> Iterator[Piece]:
        """White space waits for what follows it."""
        text = self._before + text
        shown = text.rstrip()
        self._before = text[len(shown) :]
        if shown:
            self._fresh = False
            yield shown

    def _head(self, last: bool) -> Iterator[Piece]:
        head = match_head(self._buffer[:MAX_HEAD], self._form.arguments)
        if isinstance(head, Head):
            if head.name in self._names:
                self._buffer = self._buffer[head.length :]
                yield from self._start(head.name)
                self._depth = JsonDepth()
                self._state = _State.ARGUMENTS
                return
        elif head is None and not last and len(self._buffer) < MAX_HEAD:
            return
        if self._form.end and self._buffer.lstrip().startswith("{"):
            self._state = _State.WHOLE
        else:
            yield from self._give_up()

    def _whole(self, last: bool) -> Iterator[Piece]:
        end = self._buffer.find(self._form.end)
        if end < 0 and not last:
            return
        content = self._buffer if end < 0 else self._buffer[:end]
        length = len(content) if end < 0 else end + len(self._form.end)
        call = decode_call(content, self._form.arguments, self._names)
        if call is None:
            yield from self._give_up()
            return
        self._buffer = self._buffer[length:]
        yield from self._start(call[0])
        yield CallArguments(call[1])
        self._end_call()

    def _give_up(self) -> Iterator[Piece]:
        """It was no call: what stood before it is text, and in the rest another one may begin."""
        lead, self._lead = self._lead, ""
        self._fresh = False
        self._state = _State.TEXT
        yield from self._say(lead)

    def _start(self, name: str) -> Iterator[Piece]:
        self._lead = self._before = ""
        self.num_calls += 1
        yield CallStart(name)

    def _arguments(self) -> Iterator[Piece]:
        length = self._depth.read(self._buffer)
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if text:
            yield CallArguments(text)
        if self._depth.closed:
            self._state = _State.CLOSING

    def _closing(self) -> Iterator[Piece]:
        length = self._form.closing(self._buffer)
        if length is not None:
            self._buffer = self._buffer[length:]
            self._end_call()
        elif self._form.end:  # what stands between is of no use
            self._buffer = self._buffer[-len(self._form.end) :]
        return iter(())

    def _end_call(self) -> None:
        self._state = _State.TEXT
        self.done = not self._parallel
