"""Metric families from plain numbers. A sample is its labels and its value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from quire.service.metrics.histogram import Histogram
from quire.service.metrics.loop_watch import LoopWatch

Labels = dict[str, str]
OPENMETRICS = "application/openmetrics-text"


def encode(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Return all families and their media type: OpenMetrics, which has exemplars, for who says so."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    if OPENMETRICS in accept:
        text = generate_openmetrics(registry, escaping=ALLOWUTF8)  # the default makes vllm: to vllm_
        return text, f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
    return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"


def counter(name: str, text: str, *samples: tuple[Labels, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def gauge(name: str, text: str, *samples: tuple[Labels, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def histogram(name: str, text: str, *samples: tuple[Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(samples[0][0]))
    for labels, histogram in samples:
        buckets: list[Any] = []
        for (bound, count), seen in zip(histogram.buckets(), histogram.exemplars(), strict=True):
            exemplar = None
            if seen is not None:
                exemplar = Exemplar({"request_id": seen.request_id}, seen.value, seen.at)
            buckets.append((bound, count, exemplar))
        family.add_metric(list(labels.values()), buckets, histogram.total)
    return family


def loop_families(watch: LoopWatch) -> Iterator[Metric]:
    yield gauge("quire_event_loop_tasks", "Tasks of the process's event loop", ({}, watch.num_tasks))
    text = "How late the event loop woke a sleeper: by a stall, or on a machine with too much to do"
    yield histogram("quire_event_loop_lag_seconds", text, ({}, watch.lag))
