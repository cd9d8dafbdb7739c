"""Measure what clients see of a served model.

`python -m quire.loadtest.served MODEL [--workload single,mixed] [--tensor-parallel-size N] [--runs N]
[--result-file FILE]`

Starts `quire serve MODEL` with dummy weights on loopback, streams workloads to it from processes of their own
and prints throughput, TTFT and ITL. Closed loop: `concurrency` requests are under way at any time; open loop:
they arrive by a Poisson schedule, from which latencies count. Of several runs each number's median counts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.loadtest.analysis.summary import MOST_LAG, Slo, summarize
from quire.loadtest.client.arrivals import arrival_times
from quire.loadtest.client.fleet import run_sessions
from quire.loadtest.client.sessions import due_at, from_works
from quire.loadtest.client.target import Target
from quire.loadtest.command import append_json, check_model_argument, command_parser
from quire.loadtest.provenance import Provenance, device_name
from quire.loadtest.servers.measured_server import serving
from quire.loadtest.workloads import WORKLOADS

CLIENTS = 4  # processes, so that the measuring side is not what is measured
START_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, and how its requests come: so many at once, or so many a second."""

    workload: str
    concurrency: int = 0
    rate: float = 0.0
    requests: int | None = None  # None: all of the workload


CASES = (
    Case("single", concurrency=1),
    Case("mixed", concurrency=256),
    Case("sharegpt", concurrency=256),
    Case("sharegpt", rate=20.0, requests=400),
    Case("alpaca", concurrency=256),
)


@dataclass(frozen=True, slots=True)
class ServedResult:
    """One line of loadtest/results/served.jsonl. Times are milliseconds."""

    engine: str
    model: str
    workload: str
    mode: str
    concurrency: int  # 0: an open loop
    rate: float  # requests a second; 0: a closed loop
    out_tok_s: float
    in_tok_s: float
    req_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    normalized_latency_ms: float  # mean of end-to-end time ÷ output tokens
    runs: int  # of which each number is the median
    device: str
    commit: str
    date: str
    command: str


def measure(base_url: str, model: str, case: Case, device: str, salt: str) -> ServedResult:
    """Stream the workload of `case`. Raise RuntimeError if a request fails or the client is too slow.

    All of it is greedy. With a `salt` of its own no run finds what an earlier one left in the prefix cache.
    Token ids are not asked for: they cost the server time, and no earlier figure has them.
    """
    works = WORKLOADS[case.workload]()[: case.requests]
    sessions = from_works(replace(work, temperature=0.0) for work in works)
    if case.rate:
        sessions = due_at(sessions, arrival_times(len(sessions), case.rate, burstiness=1.0, seed=0))
    target = Target(base_url=base_url, model=model, extra_body={"cache_salt": salt})
    records = run_sessions(target, sessions, concurrency=case.concurrency or None, processes=CLIENTS)
    summary = summarize(records, Slo())
    for record in records:
        if record.failure:
            raise RuntimeError(
                f"{case.workload}, request {record.session}: {record.failure}: {record.detail}"
            )
    if not summary.is_valid:
        raise RuntimeError(
            f"{case.workload}: the client was {1e3 * summary.lag.p99:.1f} ms behind its schedule at the 99th "
            f"percentile; up to {1e3 * MOST_LAG:.0f} ms make a figure"
        )
    return ServedResult(
        engine="quire",
        model=model,
        workload=case.workload,
        mode="served",
        concurrency=case.concurrency,
        rate=case.rate,
        out_tok_s=round(summary.output_rate, 1),
        in_tok_s=round(summary.input_rate, 1),
        req_s=round(summary.request_rate, 2),
        ttft_p50_ms=_ms(summary.ttft.p50),
        ttft_p99_ms=_ms(summary.ttft.p99),
        itl_p50_ms=_ms(summary.itl.p50),
        itl_p99_ms=_ms(summary.itl.p99),
        normalized_latency_ms=_ms(summary.normalized_latency.mean),
        runs=1,
        device=device,
        **asdict(Provenance.here()),
    )


def median(results: Sequence[ServedResult]) -> ServedResult:
    """Return the median of each number, over runs of one case."""
    numbers = {
        name: statistics.median(getattr(result, name) for result in results)
        for name, value in asdict(results[0]).items()
        if isinstance(value, float)
    }
    return replace(results[0], **numbers, runs=len(results))


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("model", help="a model folder; its weights are not read")
    names = list(dict.fromkeys(case.workload for case in CASES))
    parser.add_argument("--workload", default=",".join(names), help=f"of {','.join(names)}; all if left out")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs; 1 if left out")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="as of `quire serve`")
    parser.add_argument("--runs", type=int, default=3, help="of each workload")
    parser.add_argument("--result-file", type=Path, help="append one JSON object a workload")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs must be at least 1, got {arguments.runs}")
    check_model_argument(parser, arguments.model)
    name = Path(arguments.model).resolve().name
    chosen = arguments.workload.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"--workload has {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    flags = ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    flags += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization)]
    with serving(arguments.model, "--load-format", "dummy", *flags) as server:
        server.wait_for(lambda: server.graphs_left() == 0, time.monotonic() + START_SECONDS, 0.2)
        base_url = server.url
        device = device_name()
        measure(base_url, name, CASES[0], device, salt="warm-up")
        for number, case in enumerate(CASES):
            if case.workload not in chosen:
                continue
            salts = [f"case {number}, run {run}" for run in range(arguments.runs)]
            result = median([measure(base_url, name, case, device, salt) for salt in salts])
            print(json.dumps(asdict(result)), flush=True)
            if arguments.result_file is not None:
                append_json(arguments.result_file, result)


if __name__ == "__main__":
    main()
