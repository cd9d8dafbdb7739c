"""An event as a message on the wire: a server-sent event, a line, or the text of a WebSocket's frame."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framing:
    before: bytes
    after: bytes
    named: bool  # an event that has a name is sent with it

    def message(self, data: bytes, name: str = "") -> bytes:
        head = b"event: %b\n" % name.encode() if name and self.named else b""
        return head + self.before + data + self.after


SSE = Framing(b"data: ", b"\n\n", named=True)
LINES = Framing(b"", b"\n", named=False)
TEXT = Framing(b"", b"", named=False)
