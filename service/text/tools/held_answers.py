"""Answers that a grammar holds to calls, or to calls or a document: what is cut in them is no text."""

from __future__ import annotations

from quire.service.text.pieces import AnswerParser, Piece


class OnlyCalls:
    """Tells the calls of another parser. What is left as text at the end is a call that has not begun."""

    plain = False

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def done(self) -> bool:
        return self._parser.done

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that `text` settles."""
        return self._parser.push(text)

    def finish(self) -> list[Piece]:
        """Return the pieces that are left when no more text comes."""
        return [piece for piece in self._parser.finish() if not isinstance(piece, str)]


class CallsOrDocument:
    """Tells by its beginning which of both an answer is. A document is text, whatever stands in it."""

    thinking = False

    def __init__(self, parser: AnswerParser, begins: tuple[str, ...]) -> None:
        """`parser` tells of calls, which have one of `begins` before them."""
        self._calls = OnlyCalls(parser)
        self._begins = begins
        self._is_call: bool | None = None
        self._start = ""  # of an answer that may be either

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    @property
    def done(self) -> bool:
        return self._calls.done

    @property
    def plain(self) -> bool:
        return self._is_call is False

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that `text` settles."""
        if self._is_call is None:
            text, self._start = self._start + text, ""
            start = text.lstrip()
            if start.startswith(self._begins):
                self._is_call = True
            elif not any(begin.startswith(start) for begin in self._begins):
                self._is_call = False
            else:
                self._start = text
                return []
        if self._is_call:
            return self._calls.push(text)
        return [text] if text else []

    def finish(self) -> list[Piece]:
        """Return the pieces that are left when no more text comes."""
        return self._calls.finish() if self._is_call else []
