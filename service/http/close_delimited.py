"""Answers to HTTP/1.0, which knows no chunks: a body without a length ends where its connection does.

uvicorn writes a head, and then one chunk at a time, or its last mark, whatever the version of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable

_CHUNKED = b"transfer-encoding: chunked\r\n"
_END = b"\r\n"


class CloseDelimited:
    """What writes one answer, in place of `write`, without its chunks' frames."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._in_head = True
        self._is_chunked = False

    def write(self, data: bytes) -> None:
        """Take the head of the answer at first, then whole chunks, or of a body with a length any piece."""
        if self._in_head:
            self._in_head = False
            before, mark, after = data.partition(_CHUNKED)
            self._is_chunked = bool(mark)
            self._write(before + after)
            return
        self._write(b"".join(_contents(data)) if self._is_chunked else data)


def _contents(chunks: bytes) -> list[bytes]:
    """Return what is in them."""
    contents, at = [], 0
    while at < len(chunks):
        begin = chunks.index(_END, at) + len(_END)
        end = begin + int(chunks[at : begin - len(_END)], 16)
        contents.append(chunks[begin:end])
        at = end + len(_END)
    return contents
