"""Requests as OpenTelemetry traces, as Server-Timing headers, and as exemplars of histograms."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from quire.service.config import ServiceConfig
from quire.service.explain.trace_context import TraceContext
from quire.service.tracing import exporter
from quire.service.tracing.exporter import SpanExporter
from quire.service.tracing.otlp import FinishedSpan
from tests.service.asgi import get, post
from tests.service.collector import Collector
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{PARENT}-01"
BODY = {"prompt": "a b", "max_tokens": 2}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(exporter, "BATCH_SECONDS", 0.0)
    made = Collector()
    yield made
    made.close()


def attributes(span: Any) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


async def close(service: Service) -> None:
    assert service.state.exporter is not None
    await asyncio.to_thread(service.state.exporter.close)


def tell_ends(service: Service) -> None:
    """Have the engine tell of each request, as a real one does."""
    for stream in service.engine.streams:
        service.engine.tell_end(stream)


async def test_a_request_is_a_trace(make_service: Callable[..., Service], collector: Collector) -> None:
    service = make_service(otlp_endpoint=f"{collector.url}/")
    reply = await post(service.app, "/v1/completions", BODY, **{"traceparent": GIVEN, "x-request-id": "mine"})
    tell_ends(service)
    await close(service)
    root, *parts = collector.spans
    assert collector.paths == ["/v1/traces"]
    assert (root["traceId"], root["parentSpanId"], root["kind"]) == (TRACE, PARENT, 2)
    assert root["name"] == "text_completion tiny"
    told = attributes(root)
    assert told["gen_ai.request.model"] == "tiny" and told["quire.request_id"] == "mine"
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.operation.name"]) == ("2", "text_completion")
    assert reply.headers["traceparent"] == f"00-{TRACE}-{root['spanId']}-01"
    assert {part["parentSpanId"] for part in parts} == {root["spanId"]}
    taken = [int(part["endTimeUnixNano"]) - int(part["startTimeUnixNano"]) for part in parts]
    whole = int(root["endTimeUnixNano"]) - int(root["startTimeUnixNano"])
    assert abs(sum(taken) - whole) <= max(1_000_000, whole // 100)


async def test_a_trace_that_is_not_sampled_is_not_sent(
    make_service: Callable[..., Service], collector: Collector
) -> None:
    service = make_service(otlp_endpoint=collector.url)
    await post(service.app, "/v1/completions", BODY, traceparent=f"00-{TRACE}-{PARENT}-00")
    await post(service.app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    tell_ends(service)
    await close(service)
    (root,) = [span for span in collector.spans if span["kind"] == 2]
    assert root["name"] == "chat tiny" and "parentSpanId" not in root and root["traceId"] != TRACE


async def test_without_a_collector_a_trace_is_only_handed_on(service: Service) -> None:
    with_one = await post(service.app, "/v1/completions", BODY, traceparent=GIVEN)
    assert with_one.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert PARENT not in with_one.headers["traceparent"]
    assert "traceparent" not in (await post(service.app, "/v1/completions", BODY)).headers


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        "nonsense",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE.upper()}-{PARENT}-01",
    ],
)
def test_what_is_no_trace_begins_a_new_one(traceparent: str | None) -> None:
    context = TraceContext.of(traceparent)
    assert context.trace_id != TRACE and context.parent_id is None and context.sampled
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", context.header)


def test_later_versions_may_say_more() -> None:
    assert TraceContext.of(f"01-{TRACE}-{PARENT}-01-more").trace_id == TRACE


def span(name: str) -> FinishedSpan:
    return FinishedSpan(TraceContext.of(None), name, 1.0, 2.0, {"a": True, "b": 0.5, "c": ["d"]})


def test_a_collector_that_fails_costs_spans_and_nothing_else(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 500
    sender = SpanExporter(collector.url, "quire")
    for name in "ab":
        sender.add(lambda name=name: [span(name)])  # type: ignore[misc]
    sender.close()
    assert sender.dropped == 2
    assert caplog.text.count("traces of requests are lost") == 1


def test_a_collector_that_is_slow_does_not_fill_the_memory(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "MAX_WAITING", 3)
    held, entered = threading.Event(), threading.Event()

    def slow() -> list[FinishedSpan]:
        entered.set()
        assert held.wait(10)
        return [span("slow")]

    sender = SpanExporter(collector.url, "quire")
    sender.add(slow)
    assert entered.wait(10)
    for name in "abcde":
        sender.add(lambda name=name: [span(name)])  # type: ignore[misc]
    assert sender.dropped == 2
    held.set()
    sender.close()
    assert [each["name"] for each in collector.spans] == ["slow", "a", "b", "c"]


def test_the_endpoint_is_a_url() -> None:
    with pytest.raises(ValueError, match="--otlp-endpoint"):
        ServiceConfig(served_model_names=("tiny",), otlp_endpoint="collector:4318")


async def test_whole_answers_have_their_timing_and_streams_have_not(service: Service) -> None:
    timing = (await post(service.app, "/v1/completions", BODY)).headers["server-timing"]
    parts = dict(part.split(";dur=") for part in timing.split(", "))
    total = float(parts.pop("total"))
    assert {"tokenising", "engine", "detokenising"} <= set(parts)
    assert abs(sum(map(float, parts.values())) - total) <= max(1.0, total / 100)
    streamed = await post(service.app, "/v1/completions", {**BODY, "stream": True})
    assert "server-timing" not in streamed.headers


async def test_histograms_name_requests_in_openmetrics(service: Service) -> None:
    await post(service.app, "/v1/completions", BODY, **{"x-request-id": "mine"})
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    reply = await get(service.app, "/metrics", accept=accept)
    assert reply.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    named = {
        family.name
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"request_id": "mine"}
    }
    assert named == {
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:e2e_request_latency_seconds",
    }
    plain = await get(service.app, "/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"mine" not in plain.body
