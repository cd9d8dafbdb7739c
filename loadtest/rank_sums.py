"""Time sums over ranks by size, beside NCCL's and torch's: `python -m quire.loadtest.rank_sums --size 2`.

In CUDA graphs, in bf16, a process a GPU. Ours, with and without the residual's addition and the norm, is
what layers call; where it does not take a size, it is NCCL.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from quire.engine.logs import configure_logging
from quire.loadtest.command import add_line, command_parser

KIB = (8, 32, 72, 128, 256, 512, 1024, 1660, 2048, 4096, 8192, 32768)
HIDDEN = 4096
CALLS = 32  # in a graph
REPLAYS = 20
SECONDS = 150  # for all of it


def measure(rank: int, size: int, store_path: str, json_path: Path | None) -> None:
    """Time every way of every size; all ranks do, and rank 0 tells its times as they come."""
    import torch
    import torch.distributed as dist

    from quire.engine.parallel.group import RankGroup

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = RankGroup(rank, size, device, dist.FileStore(store_path, size))
    nccl = group.without_peers()
    if rank == 0:
        peers: Any = group.peers
        limits = {} if peers is None else asdict(peers.limits)
        add_line({"way": "ours", "by_peers": peers is not None, "ranks": size, **limits}, json_path)
    symmetric = _symmetric(rank, size, store_path)
    for kib in KIB:
        tokens = kib * 1024 // (2 * HIDDEN)
        shape = (max(tokens, 1), HIDDEN)
        x = torch.randn(shape, device=device).bfloat16() / 8
        residual, weight = torch.randn_like(x), torch.ones(HIDDEN, device=device).bfloat16()
        ways: dict[str, Callable[[], object]] = {
            "nccl": partial(nccl.all_reduce, x),
            "nccl_then_norm": partial(nccl.add_rms_norm, x, residual, weight, 1e-5),
            "ours": partial(group.all_reduce, x),
            "ours_with_norm": partial(group.add_rms_norm, x, residual, weight, 1e-5),
            **{name: make(x) for name, make in symmetric.items()},
        }
        for name, call in ways.items():
            try:
                microseconds = _graph_seconds(call, group) * 1e6
            except RuntimeError as error:
                print(f"{name} at {kib} KiB: {error}", file=sys.stderr)
                continue
            if rank == 0:
                add_line({"way": name, "kib": kib, "us": round(microseconds, 2), "ranks": size}, json_path)
    torch.cuda.synchronize()
    group.barrier()


def _graph_seconds(call: Callable[[], object], group: object) -> float:
    import torch

    from quire.engine.parallel.group import RankGroup

    assert isinstance(group, RankGroup)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
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
            times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return sorted(times)[len(times) // 2]


def _symmetric(rank: int, size: int, store_path: str) -> dict[str, Callable[..., Callable[[], object]]]:
    """Return torch's own sums over symmetric memory, by name, each given what it is to sum."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    dist.init_process_group(
        "nccl",
        store=dist.FileStore(f"{store_path}-torch", size),
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", rank),
    )
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name

    def copied(x: torch.Tensor) -> torch.Tensor:
        y = symm_mem.empty(x.shape, dtype=x.dtype, device=x.device)
        symm_mem.rendezvous(y, name)
        return y.copy_(x)

    def one_shot(x: torch.Tensor) -> Callable[[], object]:
        y = copied(x)
        return lambda: torch.ops.symm_mem.one_shot_all_reduce(y, "sum", name)

    def two_shot(x: torch.Tensor) -> Callable[[], object]:
        y = copied(x)
        return lambda: torch.ops.symm_mem.two_shot_all_reduce_(y, "sum", name)

    return {"torch_one_shot": one_shot, "torch_two_shot": two_shot}


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--size", type=int, default=2, help="ranks; 2 if left out")
    parser.add_argument("--json", type=Path, help="add a line for each time to this file")
    parser.add_argument("--rank", type=int, help="be this rank of a run that has begun")
    parser.add_argument("--store", help="where ranks of that run meet")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        configure_logging()  # which says by what sums go
        measure(arguments.rank, arguments.size, arguments.store, arguments.json)
        sys.stdout.flush()
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quire.loadtest.rank_sums", "--size", str(arguments.size)]
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


if __name__ == "__main__":
    sys.exit(main())
