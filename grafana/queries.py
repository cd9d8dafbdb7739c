"""What panels ask Prometheus: the PromQL of a query, and how queries are made of metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace

HERE = 'job=~"$job", instance=~"$instance"'  # Grafana's variables: the servers that were chosen
WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""
    exemplars: bool = False  # whether single requests are shown in it


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """Sum of a counter's rates, of all servers or apart `by` labels."""
    selector = f"{labels}, {HERE}" if labels else HERE
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{selector}}}[{WINDOW}]))"


def total(metric: str, labels: str = "", by: str = "") -> str:
    """Sum of a gauge."""
    selector = f"{labels}, {HERE}" if labels else HERE
    return f"sum{f' by ({by})' if by else ''} ({metric}{{{selector}}})"


def quantiles(metric: str, *percents: int) -> tuple[Query, ...]:
    buckets = rate(f"{metric}_bucket", by="le")
    return tuple(Query(f"histogram_quantile({p / 100}, {buckets})", f"p{p}") for p in percents)


def of_requests(metric: str) -> tuple[Query, ...]:
    """Quantiles of what is measured of each request, and some requests by their ids: see docs/why.md."""
    *others, last = quantiles(metric, 50, 95, 99)
    return (*others, replace(last, exemplars=True))


def mean(metric: str, by: str) -> str:
    """Of a histogram's observations."""
    return f"{rate(f'{metric}_sum', by=by)} / {rate(f'{metric}_count', by=by)}"
