"""A server under more load than it sustains: `python -m quire.loadtest.overload [--seconds S] [--json FILE]`.

The real API process with an engine without a model, whose steps take a fixed time, so that what it
sustains is known. Requests come at multiples of that rate, whatever becomes of earlier ones. Goodput is what
is answered whole, per second; /health is asked all the while by a process of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from quire.loadtest.client.arrivals import arrival_times
from quire.loadtest.client.driver import drive
from quire.loadtest.client.health_probe import probe
from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session, Turn
from quire.loadtest.client.target import Target
from quire.loadtest.command import command_parser, write_result
from quire.loadtest.servers.server_process import free_port, running

MULTIPLES = (0.5, 1.0, 2.0, 10.0)
STEP_MS = 20.0
SEQUENCES = 32
TOKENS = 32  # of each answer
QUEUE = 100
SUSTAINED = SEQUENCES / (TOKENS * STEP_MS / 1000)  # requests a second
WARM_UP = 0.4  # of the time, until the queue is as long as it gets
PROBE_SECONDS = 0.02


@dataclass(frozen=True)
class Phase:
    """One multiple of the sustained rate. `refused` are those that got 429; times are milliseconds."""

    multiple: float
    offered: float  # requests a second
    goodput: float  # requests a second
    refused: int
    failed: int
    health_p50: float
    health_p99: float


async def load(url: str, multiple: float, seconds: float) -> tuple[float, list[Record]]:
    """Send a load; return time.monotonic() of its start, and what became of every request."""
    count = math.ceil(multiple * SUSTAINED * seconds)
    times = arrival_times(count, multiple * SUSTAINED, 1.0, seed=int(10 * multiple))
    turn = Turn(prompt="a", output_len=TOKENS)
    sessions = [(at, Session(turns=[turn], at=float(due))) for at, due in enumerate(times)]
    start = time.monotonic() + 0.1
    records = await drive(Target(base_url=url, model="none"), "", sessions, None, start, lambda record: None)
    return start, records


def probe_health(port: int, seconds: float) -> list[float]:
    """Return how long /health took each time, sorted, in seconds. Raise RuntimeError if it is not well."""
    asked = probe(port, seconds, PROBE_SECONDS)
    if any(each.status != 200 for each in asked):
        raise RuntimeError("the server is not well: /health did not say 200 each time")
    return sorted(each.seconds for each in asked)


def measure(port: int, multiple: float, seconds: float, probes: ProcessPoolExecutor) -> Phase:
    probing = probes.submit(probe_health, port, seconds)
    _, records = asyncio.run(load(f"http://127.0.0.1:{port}", multiple, seconds))
    health = probing.result()
    begin = WARM_UP * seconds
    good = sum(not record.failure and begin <= record.last < seconds for record in records)
    refused = sum(record.failure == "HTTP 429" for record in records)
    return Phase(
        multiple=multiple,
        offered=round(multiple * SUSTAINED, 1),
        goodput=round(good / (seconds - begin), 1),
        refused=refused,
        failed=sum(bool(record.failure) for record in records) - refused,
        health_p50=round(1000 * health[len(health) // 2], 1),
        health_p99=round(1000 * health[-math.ceil(len(health) / 100)], 1),
    )


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--json", type=Path, help="where to write the result, too")
    arguments = parser.parse_args()
    port = free_port()
    flags = ("--port", str(port), "--step-ms", str(STEP_MS), "--sequences", str(SEQUENCES))
    limits = ("--max-num-queued-reqs", str(QUEUE))
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as probes,
        running("quire.loadtest.servers.modelless", *flags, *limits, port=port),
    ):
        phases = [measure(port, multiple, arguments.seconds, probes) for multiple in MULTIPLES]
    print(f"sustained: {SUSTAINED:g} requests/s of {TOKENS} tokens; times in ms")
    print(
        f"{'load':>6}{'offered/s':>11}{'goodput/s':>11}{'429':>7}{'failed':>8}{'/health p50':>13}{'p99':>7}"
    )
    for phase in phases:
        print(
            f"{phase.multiple:>5g}×{phase.offered:>11}{phase.goodput:>11}{phase.refused:>7}{phase.failed:>8}"
            f"{phase.health_p50:>13}{phase.health_p99:>7}"
        )
    peak = max(phase.goodput for phase in phases)
    if peak:
        print(f"goodput at {MULTIPLES[-1]:g}×: {100 * phases[-1].goodput / peak:.0f} % of its peak")
    else:
        print("no request ended in that time: give it more --seconds")
    write_result(arguments.json, {"phases": [asdict(phase) for phase in phases]})


if __name__ == "__main__":
    main()
