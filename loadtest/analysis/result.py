"""A load test as a file: what was run, against what, where, and everything that was seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.loadtest.analysis.summary import Slo, Summary, summarize
from quire.loadtest.client.records import Record
from quire.loadtest.client.target import Target
from quire.loadtest.provenance import Provenance


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which requests were sent."""

    mode: Literal["open", "closed"]
    rate: float | None = None  # sessions a second, of an open loop that was not read from a trace
    burstiness: float | None = None
    concurrency: int | None = None  # of a closed loop
    sessions: int
    processes: int
    workload: dict[str, Any]  # a recipe, or the name of a workload or a trace


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `counters` are the server's own before and after, and by how much they changed."""

    label: str
    target: Target
    load: Load
    slo: Slo
    summary: Summary
    counters_before: dict[str, float]
    counters_after: dict[str, float]
    counters_change: dict[str, float]
    provenance: dict[str, str]
    records: list[Record]

    @classmethod
    def of(
        cls,
        label: str,
        target: Target,
        load: Load,
        slo: Slo,
        counters: tuple[dict[str, float], dict[str, float]],
        records: list[Record],
    ) -> RunResult:
        before, after = counters
        changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return cls(
            label=label,
            target=target,
            load=load,
            slo=slo,
            summary=summarize(records, slo),
            counters_before=before,
            counters_after=after,
            counters_change={name: change for name, change in changes.items() if change},
            provenance=dataclasses.asdict(Provenance.here()),
            records=records,
        )


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one workload at several rates, by rate, and the knee between them."""

    runs: list[RunResult]
    latency_limit: float | None  # seconds per token, mean; None: the lowest rate, which sets it, failed
    knee: float | None  # requests a second; None: even the lowest rate is beyond it
    is_reached: bool = True  # False: latency crossed the limit at no rate; the knee is there or higher


def write_result(path: Path, result: RunResult | SweepResult) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(result) + b"\n")


def read_result(path: Path) -> RunResult:
    """Read the result of a run. Raise ValueError that names the file."""
    return _read(path, RunResult)


def read_results(path: Path) -> list[RunResult]:
    """Read one run, or all runs of a sweep. Raise ValueError that names the file."""
    raw = path.read_bytes()
    if b'"runs":' in raw[:64]:
        return _read(path, SweepResult).runs
    return [_read(path, RunResult)]


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a result of a load test: {error}") from error
