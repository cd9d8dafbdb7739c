"""Metric families from plain numbers. A sample is its labels and its value."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from service.histogram import Histogram

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
