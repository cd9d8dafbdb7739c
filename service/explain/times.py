"""What the service notes of one request on its way, and what the engine told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from quire.engine.records import RequestRecord
from quire.service.explain.trace_context import TraceContext

Status = Literal["running", "finished", "aborted", "failed"]

_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RequestRecord)


@dataclass(slots=True, eq=False)
class RequestTimes:
    """Times are time.monotonic(), which the engine's process has too."""

    tenant: str
    request_id: str
    began: float  # its headers were there
    received: float  # and its body
    path: str = ""
    model: str = ""
    trace: TraceContext | None = None  # None: nobody asks for it
    queued: float | None = None  # the engine was given it
    finished: float | None = None  # its last output had come from there
    text_ready: float | None = None  # and was text
    unread_since: float | None = None  # all was written but for what the client did not take
    ended: float | None = None
    status: Status = "running"
    text_seconds: float = 0.0  # that went into text, beside the engine's steps too
    unread_seconds: float = 0.0  # for which a write waited for the client
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    engine_requests: list[int] = field(default_factory=list)  # one a prompt
    records: dict[int, bytes] = field(default_factory=dict)  # of those that have ended there: `note`

    @property
    def is_whole(self) -> bool:
        """Return whether there is nothing to come."""
        known = len(self.records) == len(self.engine_requests)
        return self.ended is not None and (known or self.status == "failed")

    def note(self, record: RequestRecord) -> None:
        """Keep what the engine told of one of its requests that has ended.

        In one piece: dozens of small objects that stay for minutes take more memory, and hold on to that of
        all that lived beside them.
        """
        self.records[record.request_id] = _ENCODER.encode(record)

    def record(self, number: int) -> RequestRecord | None:
        """Return the record of the engine's request `number`, if that has ended."""
        packed = self.records.get(number)
        return None if packed is None else _DECODER.decode(packed)

    @property
    def decisive(self) -> RequestRecord | None:
        """Return the record of the prompt that was ready last: the answer waited for it."""
        return max(map(_DECODER.decode, self.records.values()), key=lambda record: record.ended, default=None)
