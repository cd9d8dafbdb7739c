"""Two results side by side, and what a reader of their ratios must know."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.table import Table

from quire.loadtest.analysis import bootstrap
from quire.loadtest.analysis.result import RunResult

NOT_THE_LOAD = {"processes"}  # of its fields


def remarks(first: RunResult, second: RunResult) -> Iterator[str]:
    """Yield what makes the comparison a doubtful one."""
    for name, result in (("first", first), ("second", second)):
        summary = result.summary
        what = f"the {name} run ({result.label})"
        if not summary.is_valid:
            yield f"{what} is INVALID: its client was {1e3 * summary.lag.p99:.1f} ms late at p99"
        if summary.failures:
            kinds = ", ".join(f"{count} × {kind}" for kind, count in summary.failures.items())
            yield f"{what} had failures, which no figure counts: {kinds} of {summary.requests} requests"
        if not summary.latency.count:
            yield f"{what} has no request that succeeded: there is nothing to compare"
    one, two = _load(first), _load(second)
    differing = [
        f"{name} {one.get(name)} and {two.get(name)}"
        for name in [*one, *(name for name in two if name not in one)]
        if one.get(name) != two.get(name)
    ]
    if differing:
        yield f"the workloads differ: {', '.join(differing)}"


def table_of(first: RunResult, second: RunResult) -> Table:
    """Return a table of two runs in which requests succeeded."""
    table = Table("figure", "first", "second", "ratio", "95 % interval", "", title="second ÷ first")
    for ratio in bootstrap.compare(first.records, second.records):
        table.add_row(
            ratio.name,
            f"{1e3 * ratio.first:.2f} ms",
            f"{1e3 * ratio.second:.2f} ms",
            f"{ratio.ratio:.3f}",
            f"{ratio.low:.3f} – {ratio.high:.3f}",
            "differs" if ratio.differs else "no difference shown",
        )
    rates = first.summary.output_rate, second.summary.output_rate
    table.add_row("output tok/s", *(f"{rate:.0f}" for rate in rates), f"{rates[1] / rates[0]:.3f}", "–", "")
    return table


def _load(result: RunResult) -> dict[str, object]:
    """Return what was asked of the server, flat."""
    fields = msgspec.to_builtins(result.load)
    workload = fields.pop("workload")
    kept = {name: value for name, value in fields.items() if name not in NOT_THE_LOAD}
    target = {name: getattr(result.target, name) for name in ("api", "ignore_eos", "token_ids")}
    return {**kept, **workload, **target}
