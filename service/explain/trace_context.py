"""The W3C trace context of a request: https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Our own span in a trace, and whose child it is."""

    trace_id: str
    span_id: str
    parent_id: str | None
    sampled: bool

    @classmethod
    def of(cls, traceparent: str | None) -> TraceContext:
        """Return a new span in the trace that the header names; in a new trace if it names none."""
        found = _TRACEPARENT.fullmatch(traceparent or "")
        span_id = secrets.token_hex(8)
        if found is not None:
            version, trace_id, parent_id, flags, rest = found.groups()
            known = version != "ff" and (version != "00" or rest is None)
            if known and int(trace_id, 16) and int(parent_id, 16):
                return cls(trace_id, span_id, parent_id, bool(int(flags, 16) & _SAMPLED))
        return cls(secrets.token_hex(16), span_id, None, True)

    @property
    def header(self) -> str:
        """Return the traceparent of whatever is done for our span."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"
