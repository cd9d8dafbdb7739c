"""Requests as spans in OTLP's JSON encoding: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.service.explain.causes import causes
from quire.service.explain.reply import Cause
from quire.service.explain.spans import Stretch, stretches
from quire.service.explain.times import RequestTimes
from quire.service.explain.trace_context import TraceContext

Json = dict[str, Any]
Value = str | int | float | bool | list[str]

INTERNAL, SERVER = 1, 2  # kinds of spans
ERROR = 2  # a status
_EMBEDDING = ("/v1/embeddings", "/api/embed", "/api/embeddings")
_RANKING = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")
_OPERATIONS = {
    "/v1/completions": "text_completion",
    **dict.fromkeys(_EMBEDDING, "embeddings"),
    **dict.fromkeys(_RANKING, "rerank"),
    "/classify": "classify",
}  # others are chats


@dataclass(frozen=True)
class FinishedSpan:
    """A span by itself. Times are seconds since the epoch."""

    context: TraceContext
    name: str
    start: float
    end: float
    attributes: dict[str, Value]
    failed: bool = False
    kind: int = SERVER
    events: Sequence[tuple[float, str, dict[str, Value]]] = ()


def export_request(service: str, spans: list[FinishedSpan]) -> Json:
    """Return the body of an export of `spans`."""
    resource: dict[str, Value] = {"service.name": service}
    encoded = [_encode(span) for span in spans]
    scope = {"scope": {"name": "quire"}, "spans": encoded}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}


def request_spans(times: RequestTimes) -> list[FinishedSpan]:
    """Return the span of a request that has ended, and those of the parts of its time."""
    trace = times.trace
    assert trace is not None and times.ended is not None
    epoch = time.time() - time.monotonic()
    total, parts = stretches(times, times.ended)
    began = epoch + times.began
    # What others sent has no names in a trace: whoever reads traces may have no key at all.
    told: list[tuple[float, str, dict[str, Value]]] = [
        (began + total, cause.kind, _cause_attributes(cause))
        for cause in causes(times, total, lambda number: None)
    ]
    root = FinishedSpan(
        trace,
        f"{_operation(times)} {times.model}",
        began,
        began + total,
        _request_attributes(times),
        failed=times.status == "failed",
        events=told,
    )
    return [root, *(_part(trace, began, part) for part in parts)]


def _cause_attributes(cause: Cause) -> dict[str, Value]:
    attributes: dict[str, Value] = {"text": cause.text}
    return attributes | ({"ms": cause.ms} if isinstance(cause.ms, float) else {})


def _operation(times: RequestTimes) -> str:
    return _OPERATIONS.get(times.path, "chat")


def _request_attributes(times: RequestTimes) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": _operation(times),
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": times.model,
        "gen_ai.response.model": times.model,
        "gen_ai.response.finish_reasons": times.finish_reasons,
        "gen_ai.usage.input_tokens": times.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": times.cached_tokens,
        "gen_ai.usage.output_tokens": times.output_tokens,
        "url.path": times.path,
        "quire.request_id": times.request_id,
        "quire.status": times.status,
    }
    return attributes | ({"error.type": "engine_error"} if times.status == "failed" else {})


def _part(trace: TraceContext, began: float, part: Stretch) -> FinishedSpan:
    counts = {"tokens": part.tokens, "steps": part.steps, "pieces": part.pieces * (part.pieces > 1)}
    return FinishedSpan(
        TraceContext(trace.trace_id, secrets.token_hex(8), trace.span_id, trace.sampled),
        part.name,
        began + part.start,
        began + part.start + part.seconds,
        {f"quire.{name}": count for name, count in counts.items() if count},
        kind=INTERNAL,
    )


def _encode(span: FinishedSpan) -> Json:
    encoded = {
        "traceId": span.context.trace_id,
        "spanId": span.context.span_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": _nanoseconds(span.start),
        "endTimeUnixNano": _nanoseconds(span.end),
        "attributes": _attributes(span.attributes),
        "events": [
            {"timeUnixNano": _nanoseconds(at), "name": name, "attributes": _attributes(attributes)}
            for at, name, attributes in span.events
        ],
        "status": {"code": ERROR} if span.failed else {},
    }
    parent = span.context.parent_id
    return encoded if parent is None else {**encoded, "parentSpanId": parent}


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e9))


def _attributes(attributes: dict[str, Value]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Value) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": value}
