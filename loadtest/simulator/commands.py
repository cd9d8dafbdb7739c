"""`python -m quire.loadtest simulate`, a run on the virtual clock, and `record`, what its costs fit."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire.loadtest.analysis.result import Load, RunResult, write_result
from quire.loadtest.analysis.summary import Slo
from quire.loadtest.client.arrivals import arrival_times
from quire.loadtest.client.lengths import parse_shape
from quire.loadtest.client.sessions import Recipe, describe, draw_sessions, due_at
from quire.loadtest.client.target import Target
from quire.loadtest.simulator.geometry import A100_40GB, OPT_13B, kv_slots
from quire.loadtest.simulator.simulation import simulate
from quire.loadtest.simulator.step_costs import FEATURES, fit, read_records, roofline, write_records
from quire.loadtest.simulator.systems import NAMES, System

console = Console()


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", choices=tuple(NAMES), default="paged")
    parser.add_argument("--rate", type=float, required=True, help="requests a second, by a Poisson schedule")
    parser.add_argument("--lengths", default="sharegpt", help="sharegpt, alpaca, or PROMPTxOUTPUT")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--n", type=int, default=1, help="samples of each request")
    parser.add_argument("--beam-width", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, help="tokens of KV memory; those of an A100 40GB if left out")
    parser.add_argument("--max-model-len", type=int, default=OPT_13B.max_model_len)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--host-slots", type=int, default=0, help="tokens of host memory for swapping")
    parser.add_argument("--costs", type=Path, help="step records to fit; a roofline of OPT-13B if left out")
    parser.add_argument("--json", type=Path, help="write the result here, as of a load test")
    parser.set_defaults(call=simulate_command)


def simulate_command(arguments: argparse.Namespace) -> int:
    recipe = Recipe(
        parse_shape(arguments.lengths),
        arguments.requests,
        arguments.seed,
        n=arguments.n,
        beam_width=arguments.beam_width,
    )
    times = arrival_times(recipe.count, arguments.rate, 1.0, arguments.seed)
    if arguments.costs:
        costs = fit(read_records(arguments.costs), f"fitted to half of {arguments.costs}")
        console.print(costs.describe(), highlight=False, soft_wrap=True)
    else:
        costs = roofline(OPT_13B, A100_40GB, arguments.block_size)
    system = System(
        arguments.system,
        arguments.slots or kv_slots(OPT_13B),
        arguments.max_model_len,
        arguments.block_size,
        host_slots=arguments.host_slots,
        preemption="swap" if arguments.host_slots else "recompute",
    )
    run = simulate(due_at(draw_sessions(recipe), times), system, costs)
    table = Table(system.name, f"{arguments.rate:g} requests/s", title=costs.source)
    rows = {
        "normalised latency": f"{1e3 * run.normalized_latency():.1f} ms/token",
        "requests under way": f"{run.mean_requests():.2f}",
        "preemptions": str(run.preemptions),
        "blocks saved by sharing": f"{run.blocks_saved():.1f} %",
        **{f"{part}, under load": f"{share:.1f} %" for part, share in run.shares_under_load().items()},
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    if arguments.json:
        load = Load(
            mode="open",
            rate=arguments.rate,
            burstiness=1.0,
            sessions=recipe.count,
            processes=0,
            workload={"lengths": arguments.lengths, **describe(recipe)},
        )
        target = Target(base_url="", model=costs.source)
        result = RunResult.of(f"{system.name}, simulated", target, load, Slo(), ({}, {}), run.records)
        write_result(arguments.json, result)
    return 0


def add_record_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model folder or Hub id")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--lengths", default="sharegpt", help="sharegpt, alpaca, or PROMPTxOUTPUT")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--output", type=Path, required=True, help="the record file, JSON lines")
    parser.set_defaults(call=record_command)


def record_command(arguments: argparse.Namespace) -> int:
    """Step a real engine through a workload, write what every step took, and say how well a fit does."""
    from quire.engine.config import EngineConfig
    from quire.engine.messages import Request, SamplingParams
    from quire.engine.startup import start_engine
    from quire.loadtest.simulator.recording import RecordingRunner

    core, info = start_engine(
        EngineConfig(
            model=arguments.model, load_format=arguments.load_format, max_num_seqs=arguments.max_num_seqs
        )
    )
    while core.capture():
        pass
    recipe = Recipe(parse_shape(arguments.lengths), arguments.requests)
    longest = info.max_request_tokens
    for warm in (True, False):
        runner = RecordingRunner(core.runner)
        if not warm:
            core.runner = runner
        for number, session in enumerate(draw_sessions(recipe)[: 8 if warm else None]):
            (turn,) = session.turns
            prompt = [int(token) % info.vocab_size for token in turn.prompt][: longest - 1]
            most = min(turn.output_len, longest - len(prompt))
            params = SamplingParams(max_tokens=most, ignore_eos=True, seed=number)
            core.add(Request(number + (0 if warm else 1 << 32), prompt, params, cache_salt=str(warm)))
        while core.has_work:
            core.step()
    write_records(arguments.output, runner.records)
    costs = fit(runner.records, f"fitted to half of {arguments.output}")
    console.print(f"{len(runner.records)} steps on {info.device} in {arguments.output}", soft_wrap=True)
    for name, seconds in zip(FEATURES, costs.seconds, strict=True):
        console.print(f"  {name}: {1e6 * seconds:.4g} µs", highlight=False)
    console.print(costs.describe(), highlight=False, soft_wrap=True)
    return 0
