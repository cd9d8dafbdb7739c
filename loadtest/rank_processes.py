"""Commands that are several ranks: what starts one process a GPU, and what times their graphs."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.logs import configure_logging
from quire.loadtest.command import command_parser
from quire.loadtest.provenance import module_name

if TYPE_CHECKING:
    from quire.engine.parallel.group import RankGroup

CALLS = 32  # in a graph
REPLAYS = 20
SECONDS = 150  # for all of it

Measure = Callable[["RankGroup", str, Path | None], None]  # the group, where ranks meet, where results go


def run_ranks(text: str | None, measure: Measure) -> int:
    """Be a command that has `measure` run as every rank, or one of those ranks; return the exit status.

    Neither NCCL nor torch uses NVLink multicast.
    """
    parser = command_parser(text)
    parser.add_argument("--size", type=int, default=2, help="ranks; 2 if left out")
    parser.add_argument("--json", type=Path, help="add a line for each time to this file")
    parser.add_argument("--rank", type=int, help="be this rank of a run that has begun")
    parser.add_argument("--store", help="where ranks of that run meet")
    arguments = parser.parse_args()
    if arguments.rank is None:
        return _run_all(arguments)
    configure_logging()  # which says by what sums go
    import torch
    import torch.distributed as dist

    from quire.engine.parallel.group import RankGroup

    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    device = torch.device("cuda", arguments.rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(arguments.store, arguments.size)
    group = RankGroup(arguments.rank, arguments.size, device, store)
    measure(group, arguments.store, arguments.json)
    torch.cuda.synchronize()
    group.barrier()
    sys.stdout.flush()
    os._exit(0)


def _run_all(arguments: argparse.Namespace) -> int:
    """Run this command once for each rank, until all have ended, one has failed, or time is up."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module_name(), "--size", str(arguments.size)]
        command += ["--json", str(arguments.json)] if arguments.json is not None else []
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--store", f"{folder}/store"])
            for rank in range(arguments.size)
        ]
        end = time.monotonic() + SECONDS
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
                if time.monotonic() > end:
                    break
                time.sleep(0.1)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return 1 if any(rank.returncode for rank in ranks) else 0


def graph_seconds(call: Callable[[], object], group: RankGroup, calls: int = CALLS) -> float:
    """Return what a call takes in a graph of so many, on this rank."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        times = []
        for _ in range(REPLAYS):
            group.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # the first waits for the last rank
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / calls)
    return sorted(times)[len(times) // 2]
