"""Metric families from plain numbers. A sample is its labels and its value."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.service.metrics.histogram import Histogram
from quire.service.metrics.loop_watch import LoopWatch

Labels = dict[str, str]


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
        family.add_metric(list(labels.values()), histogram.buckets(), histogram.total)
    return family


def loop_families(watch: LoopWatch) -> Iterator[Metric]:
    yield gauge("quire_event_loop_tasks", "Tasks of the process's event loop", ({}, watch.num_tasks))
    text = "How late the event loop woke a sleeper: by a stall, or on a machine with too much to do"
    yield histogram("quire_event_loop_lag_seconds", text, ({}, watch.lag))
