"""Measure what the ring of moves takes of decode256: `python -m quire.loadtest.move_ring_decode MODEL`.

One engine with dummy weights runs the workload by turns with the ring and without, so that both see the same
graphs, memory and clocks. Prints tokens a second of both, and how much of each step is the host's.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from quire.engine.config import EngineConfig
from quire.engine.memory.move_ring import MoveRing
from quire.engine.startup import start_with_graphs
from quire.loadtest.command import command_parser, write_json
from quire.loadtest.move_ring_cost import NoRing
from quire.loadtest.offline.bench import Run, fit, queue, requests, run_workload
from quire.loadtest.provenance import device_name
from quire.loadtest.workloads import WORKLOADS
from quire.offline_engine import without_collections

RINGS = (MoveRing, NoRing)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("model", help="a model's folder")
    parser.add_argument("--rounds", type=int, default=6, help="runs with the ring, and as many without (6)")
    parser.add_argument("--workload", default="decode256", choices=WORKLOADS)
    parser.add_argument("--json", type=Path, help="where one JSON object goes")
    arguments = parser.parse_args()
    runs = by_turns(arguments.model, arguments.workload, arguments.rounds)
    output = sum(one.output_tokens for one in WORKLOADS[arguments.workload]())
    figures: dict[str, object] = {"model": Path(arguments.model).name, "workload": arguments.workload}
    for name, found in zip(("with", "without"), runs, strict=True):
        seconds = [run.seconds for run in found]
        host = [1e6 * (run.phases["schedule"] + run.phases["commit"]) / run.steps for run in found]
        figures[name] = {
            "tok_s": round(output / statistics.median(seconds), 1),
            "least_and_most": [round(output / each, 1) for each in (max(seconds), min(seconds))],
            "host_us": round(statistics.median(host), 1),
            "steps": found[0].steps,
        }
    ratios = [bare.seconds / ringed.seconds for ringed, bare in zip(*runs, strict=True)]
    figures["ratio"] = round(statistics.median(ratios), 4)
    print(figures)
    if arguments.json is not None:
        write_json(arguments.json, device_name(), figures)


def by_turns(model: str, workload: str, rounds: int) -> tuple[list[Run], list[Run]]:
    """Return the runs of an engine with the ring, and those without."""
    core, info = start_with_graphs(EngineConfig(model=model, load_format="dummy"))
    work = fit(workload, WORKLOADS[workload](), info)
    found: tuple[list[Run], list[Run]] = ([], [])
    for turn in range(-1, rounds):  # the first warms up
        for at in (0, 1) if turn % 2 else (1, 0):
            core.scheduler.blocks.ring.__class__ = RINGS[at]
            queue(core, requests(work, seed=(2 * turn + at + 2) << 20), in_order=False)
            with without_collections():
                run = run_workload(core)
            if turn >= 0:
                found[at].append(run)
                print(("with", "without")[at], f"{run.seconds:.4f} s", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
