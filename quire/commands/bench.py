"""`quire bench`: offline throughput, beside the engine's alone and the hardware's bound."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from quire.commands.settings import check_folders, check_gives_text, engine_config
from quire.service.commands.engine_flags import add_engine_flags
from quire.service.commands.flags import flag
from quire.service.commands.parser import Parser
from quire.service.commands.usage_error import UsageError

TRACED_STEPS = 32  # of each workload, with --profile


def add_flags(parser: Parser) -> None:
    add_engine_flags(parser)
    group = parser.group("Measuring")
    flag(
        group,
        "--workload",
        default="mixed",
        metavar="NAMES",
        help="Names, separated by commas (loadtest/workloads.py).",
    )
    flag(group, "--runs", type=int, default=3, help="The median run is reported.")
    flag(
        group,
        "--in-order",
        action="store_true",
        help="Queue requests as a server gets them, not those with most tokens to come first.",
    )
    flag(group, "--result-file", type=Path, shown="none", help="Append one JSON object a workload.")
    flag(
        group,
        "--profile",
        type=Path,
        metavar="FOLDER",
        shown="none",
        help="Write traces of steps there, and print where their time goes.",
    )


def run(arguments: Namespace) -> int:
    """Print a table that grows by a row a workload."""
    import torch

    from quire.engine.startup import capture_all, start_engine
    from quire.loadtest.command import append_json
    from quire.loadtest.offline import bench, roofline
    from quire.loadtest.offline.profiling import profile_steps, show_profile
    from quire.loadtest.workloads import WORKLOADS
    from quire.offline_engine import OfflineEngine
    from quire.service.commands.progress import PhaseBars
    from quire.service.text.model_tokenizer import tokenizer_of

    names = arguments.workload.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise UsageError(f"--workload {unknown[0]}: there is {', '.join(WORKLOADS)}")
    if arguments.runs < 1:
        raise UsageError(f"--runs must be at least 1, got {arguments.runs}")
    if arguments.profile is not None:
        try:
            arguments.profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--profile {arguments.profile} is no folder to write to: {error.strerror}"
            ) from None
    config = engine_config(arguments)
    check_folders(config)
    check_gives_text(config)
    core, info = start_engine(config, PhaseBars().show)
    workloads = [(name, bench.fit(name, WORKLOADS[name](), info)) for name in names]
    engine = OfflineEngine(core, tokenizer_of(config, None))
    capture_all(core)
    device = torch.device("cpu" if info.device == "cpu" else "cuda")
    ceilings = roofline.measure_ceilings(device, getattr(torch, info.dtype))
    results = []
    for name, work in workloads:
        try:
            result = bench.bench(
                engine, info, name, work, arguments.runs, ceilings, in_order=arguments.in_order
            )
        except bench.WorkloadFailed as failure:
            print(f"quire bench: {name}: {failure}", file=sys.stderr)
            return 1
        results.append(result)
        bench.show(results, ceilings, info)
        bench.show_step(result, ceilings)
        try:
            if arguments.profile is not None:
                requests = bench.requests(work, seed=1 << 41)
                bench.queue(core, requests, in_order=arguments.in_order)
                skip = result.steps // 3
                profile = profile_steps(core, name, requests, skip, TRACED_STEPS, arguments.profile)
                show_profile(profile)
                result = replace(result, traced=profile.summary())
        finally:  # what was measured is not lost with a trace
            if arguments.result_file is not None:
                append_json(arguments.result_file, result)
    return 0
