"""Tell what a cluster's requests came to, with Redis well and during each fault of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from quire.loadtest.analysis.bootstrap import Difference, Values, bootstrap_difference, percentile
from quire.loadtest.client.records import Record

HIT = 0.95  # of a prefix: so much of it must be cached
CAPTION = "ms, but for: whole, how long after a fault the registry was whole again, at most"


@dataclass(frozen=True)
class Outcome:
    """The outcome of requests under one condition; times are ms, of those that did not fail."""

    requests: int
    failed: int
    hits: float  # the share of requests that found their prefix
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float


@dataclass(frozen=True)
class FaultOutcome:
    """Times are ms if not said. `later`: by how much TTFT exceeds that with Redis well."""

    outcome: Outcome
    p50_later: Difference
    p90_later: Difference
    p99_later: Difference
    lookup_mean: float  # what a request waited for the registry
    recovery_seconds: list[float]  # after each turn, from the end of the fault until the registry was whole


def outcome_of(records: Sequence[Record], prefix_tokens: int) -> Outcome:
    """Summarise. Raise ValueError if all failed."""
    ttft = _ttft(records)
    if not len(ttft):
        raise ValueError(f"no request was answered: {records[0].failure} {records[0].detail}")
    good = [record for record in records if not record.failure]
    hits = sum(record.cached_tokens >= HIT * prefix_tokens for record in good) / len(good)
    p50, p90, p99 = np.percentile(ttft, [50, 90, 99]).tolist()
    return Outcome(len(records), len(records) - len(good), hits, p50, p90, p99)


def compare_to_well(
    well: Sequence[Sequence[Record]],
    during: Sequence[Sequence[Record]],
    prefix_tokens: int,
    lookup_seconds: float,
    recoveries: list[float],
) -> FaultOutcome:
    """Compare turns `during` a fault, which waited `lookup_seconds` in all, with `well` ones between them."""
    one, two = ([_ttft(turn) for turn in turns] for turns in (well, during))
    p50, p90, p99 = (bootstrap_difference(one, two, percentile(percent), seed=0) for percent in (50, 90, 99))
    records = [record for turn in during for record in turn]
    lookup = 1e3 * lookup_seconds / len(records)
    return FaultOutcome(outcome_of(records, prefix_tokens), p50, p90, p99, lookup, recoveries)


def table_of_work(outcomes: dict[str, Outcome], title: str) -> Table:
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for heading in ("requests", "failed", "prefix hits", "TTFT: p50", "p90", "p99 [ms]"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, each in outcomes.items():
        times = [f"{time:,.0f}" for time in (each.ttft_p50, each.ttft_p90, each.ttft_p99)]
        table.add_row(name, str(each.requests), str(each.failed), f"{each.hits:.1%}", *times)
    return table


def table_of_faults(faults: dict[str, FaultOutcome]) -> Table:
    title = "While Redis fails: TTFT less that of the turns in which it does not"
    table = Table(title=title, caption=CAPTION, box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("Redis", no_wrap=True)
    for heading in ("requests", "failed", "hits", "p50", "p90", "p99", "p99: 95 %", "lookup", "whole"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, each in faults.items():
        outcome, p99 = each.outcome, each.p99_later
        table.add_row(
            name,
            str(outcome.requests),
            str(outcome.failed),
            f"{outcome.hits:.1%}",
            f"{each.p50_later.difference:+.0f}",
            f"{each.p90_later.difference:+.0f}",
            f"{p99.difference:+.0f}",
            f"{p99.low:+.0f} … {p99.high:+.0f}",
            f"{each.lookup_mean:.1f}",
            f"{max(each.recovery_seconds):.1f} s",
        )
    return table


def _ttft(records: Sequence[Record]) -> Values:
    return np.array([1e3 * record.ttft for record in records if not record.failure])
