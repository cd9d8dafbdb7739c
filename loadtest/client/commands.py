"""Run each subcommand of `python -m quire.loadtest` by its flags."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from quire.loadtest.analysis.comparison import remarks, table_of
from quire.loadtest.analysis.knee import describe_knee, find_knee
from quire.loadtest.analysis.result import (
    Load,
    RunResult,
    SweepResult,
    read_result,
    read_results,
    write_result,
)
from quire.loadtest.analysis.summary import MOST_LAG, Slo
from quire.loadtest.client.arrivals import arrival_times
from quire.loadtest.client.counters import read_counters
from quire.loadtest.client.fleet import OnProgress, run_sessions
from quire.loadtest.client.lengths import parse_shape
from quire.loadtest.client.options import check_options
from quire.loadtest.client.sessions import (
    Recipe,
    Session,
    describe,
    draw_sessions,
    due_at,
    from_works,
    read_trace,
)
from quire.loadtest.client.target import Target, first_model
from quire.loadtest.workloads import LAST_TOKEN, WORKLOADS

Arguments = argparse.Namespace
console = Console()


def run(arguments: Arguments) -> int:
    """Run one load test. Return 1 if a request failed or the run is invalid."""
    check_options(arguments)
    target = _target(arguments)
    sessions, workload = _sessions(arguments)
    if arguments.rate is None and arguments.concurrency is None and not arguments.trace:
        raise ValueError("give --rate for an open loop, --concurrency for a closed one, or --trace")
    if arguments.rate is not None:
        sessions = due_at(sessions, _times(arguments, len(sessions), arguments.rate))
    result = _measure(arguments, target, sessions, workload, arguments.rate, arguments.concurrency)
    _show(result)
    if arguments.json:
        write_result(arguments.json, result)
    if arguments.html:
        _write_html(arguments, [result], None, None)
    return 0 if result.summary.is_valid and not result.summary.failures else 1


def sweep(arguments: Arguments) -> int:
    """Run rising rates. Return 1 if not even the lowest was sustained, or a run is invalid."""
    check_options(arguments)
    target = _target(arguments)
    sessions, workload = _sessions(arguments)
    salt = target.extra_body.get("cache_salt") or secrets.token_hex(4)
    results: dict[float, RunResult] = {}

    def measure(rate: float) -> float:
        times = _times(arguments, len(sessions), rate)
        own = target if arguments.openai_only else target.salted(f"{salt}, {rate:g} requests/s")
        results[rate] = _measure(arguments, own, due_at(sessions, times), workload, rate, None)
        summary = results[rate].summary
        latency = summary.normalized_latency.mean
        console.print(
            f"{rate:8.3g} req/s: {1e3 * latency:8.2f} ms/token, {summary.output_rate:8.0f} tok/s, "
            f"TTFT p99 {1e3 * summary.ttft.p99:.0f} ms{'' if summary.is_valid else ', INVALID'}"
        )
        _show_failures(results[rate])
        return latency if summary.is_sustained else math.inf

    limit = arguments.latency_limit and arguments.latency_limit / 1e3
    points, limit, knee = find_knee(measure, arguments.rates, limit, arguments.refine)
    where = describe_knee(points, limit)
    console.print(f"knee: {where}", soft_wrap=True)
    runs = [results[rate] for rate in sorted(results)]
    if arguments.json:
        is_reached = any(limit is None or latency > limit for _, latency in points)
        write_result(
            arguments.json, SweepResult(runs=runs, latency_limit=limit, knee=knee, is_reached=is_reached)
        )
    if arguments.html:
        _write_html(arguments, runs, limit, where)
    if not any(result.summary.latency.count for result in runs):
        console.print("[red]no request succeeded[/red]")
    return 0 if runs[0].summary.is_sustained and all(result.summary.is_valid for result in runs) else 1


def compare(arguments: Arguments) -> int:
    """Compare two runs. Return 1 if one has nothing to compare: no request of it succeeded."""
    first, second = read_result(arguments.first), read_result(arguments.second)
    for remark in remarks(first, second):
        console.print(f"[red]{escape(remark)}[/red]", highlight=False, soft_wrap=True)
    if not all(result.summary.latency.count for result in (first, second)):
        return 1
    console.print(table_of(first, second))
    return 0


def report(arguments: Arguments) -> int:
    results = [result for path in arguments.results for result in read_results(path)]
    _write_html(arguments, results, None, None)
    return 0


def _measure(
    arguments: Arguments,
    target: Target,
    sessions: list[Session],
    workload: dict[str, Any],
    rate: float | None,
    concurrency: int | None,
) -> RunResult:
    before = asyncio.run(_counters(target, _api_key(arguments)))
    total = sum(len(session.turns) for session in sessions)
    with _progress(total) as on_progress:
        records = run_sessions(
            target,
            sessions,
            concurrency=concurrency,
            processes=arguments.processes,
            api_key=_api_key(arguments),
            on_progress=on_progress,
        )
    after = asyncio.run(_counters(target, _api_key(arguments)))
    load = Load(
        mode="open" if concurrency is None else "closed",
        rate=rate,
        burstiness=_burstiness(arguments) if rate is not None else None,
        concurrency=concurrency,
        sessions=len(sessions),
        processes=arguments.processes,
        workload=workload,
    )
    label = arguments.label or _label(workload, rate, concurrency)
    if target.transport == "websocket" and not arguments.label:
        label = f"{label}, WebSocket"
    return RunResult.of(label, target, load, _slo(arguments), (before, after), records)


def _target(arguments: Arguments) -> Target:
    try:
        extra = msgspec.json.decode(arguments.extra_body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"--extra-body must be a JSON object: {error}") from error
    target = Target(
        base_url=arguments.url.rstrip("/"),
        model=arguments.model or "",
        api=arguments.api,
        ignore_eos=arguments.ignore_eos and not arguments.openai_only,
        token_ids=not arguments.openai_only,
        extra_body=extra,
        timeout=arguments.timeout,
        transport=arguments.transport,
    )
    if target.model:
        return target
    return msgspec.structs.replace(target, model=asyncio.run(first_model(target, _api_key(arguments))))


def _api_key(arguments: Arguments) -> str:
    """Read the key from the environment, so that no result or process list shows it."""
    if arguments.api_key_env is None:
        return ""
    if arguments.api_key_env not in os.environ:
        raise ValueError(f"--api-key-env: the environment has no {arguments.api_key_env}")
    return os.environ[arguments.api_key_env]


async def _counters(target: Target, api_key: str) -> dict[str, float]:
    client = target.client(api_key)
    try:
        return await read_counters(client)
    finally:
        client.close()


def _sessions(arguments: Arguments) -> tuple[list[Session], dict[str, Any]]:
    """Return what to send, and plain data that says what it is."""
    count = arguments.requests
    if arguments.trace:
        return read_trace(arguments.trace)[:count], {"trace": str(arguments.trace)}
    if arguments.workload:
        return from_works(WORKLOADS[arguments.workload]()[:count]), {"workload": arguments.workload}
    lengths = arguments.lengths or "sharegpt"
    recipe = Recipe(
        shape=parse_shape(lengths),
        count=200 if count is None else count,
        seed=arguments.seed or 0,
        text=arguments.text or arguments.api == "chat",
        most_token=LAST_TOKEN if arguments.most_token is None else arguments.most_token,
        shared_prefix=arguments.shared_prefix,
        turns=arguments.turns,
        think=arguments.think,
        n=arguments.n,
        beam_width=arguments.beam_width,
    )
    return draw_sessions(recipe), {"lengths": lengths, **describe(recipe)}


def _burstiness(arguments: Arguments) -> float:
    return 1.0 if arguments.burstiness is None else float(arguments.burstiness)


def _times(arguments: Arguments, count: int, rate: float) -> NDArray[np.float64]:
    return arrival_times(count, rate, _burstiness(arguments), arguments.seed or 0)


def _slo(arguments: Arguments) -> Slo:
    limits = (arguments.slo_ttft, arguments.slo_tpot, arguments.slo_latency)
    ttft, tpot, latency = (limit and limit / 1e3 for limit in limits)
    return Slo(ttft=ttft, tpot=tpot, latency=latency)


def _label(workload: dict[str, Any], rate: float | None, concurrency: int | None) -> str:
    name = next(str(workload[key]) for key in ("lengths", "workload", "trace") if key in workload)
    if concurrency is not None:
        return f"{name}, {concurrency} at once"
    return name if rate is None else f"{name}, {rate:.4g} req/s"


@contextmanager
def _progress(total: int) -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total)

        def update(done: int, failed: int) -> None:
            text = f"requests ({failed} failed)" if failed else "requests"
            progress.update(task, completed=done, description=text)

        yield update


def _show(result: RunResult) -> None:
    summary = result.summary
    table = Table("ms", "mean", "p50", "p90", "p99", "max", title=result.label)
    for name, spread in summary.spreads():
        in_ms = spread.in_ms()
        values = (in_ms.mean, in_ms.p50, in_ms.p90, in_ms.p99, in_ms.most)
        table.add_row(name, *(f"{value:.2f}" for value in values))
    console.print(table)
    console.print(
        f"{summary.requests} requests in {summary.seconds:.2f} s: {summary.request_rate:.2f} req/s, "
        f"{summary.output_rate:.0f} output tok/s, {summary.input_rate:.0f} input tok/s, "
        f"goodput {summary.goodput:.2f} req/s"
    )
    console.print(f"cached: {summary.cached_tokens} of {summary.prompt_tokens} prompt tokens")
    for name, change in result.counters_change.items():
        console.print(f"  {name}: {change:+g}", highlight=False)
    _show_failures(result)
    if not summary.is_valid:
        console.print(
            f"[red]INVALID[/red]: the client was {1e3 * summary.lag.p99:.1f} ms behind its schedule at p99, "
            f"more than {1e3 * MOST_LAG:.0f}; use more --processes or another machine"
        )


def _show_failures(result: RunResult) -> None:
    for kind, count in result.summary.failures.items():
        example = next(record for record in result.records if record.failure == kind)
        console.print(f"[red]{count} × {kind}[/red]: {escape(example.detail)}", highlight=False)


def _write_html(
    arguments: Arguments, results: list[RunResult], limit: float | None, knee: str | None
) -> None:
    from quire.loadtest.analysis.report import render

    title = f"Load test: {results[0].label}"
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    arguments.html.write_text(render(title, results, limit, knee), encoding="utf-8")
