"""Time sums over ranks by size, beside NCCL's and torch's: `python -m quire.loadtest.rank_sums --size 2`.

In CUDA graphs, in bf16, a process a GPU. Ours, with and without the residual's addition and the norm, is
what layers call. Sums in the order of the ranks for which NCCL only carries numbers, whole or in slices, are
what layers of three ranks and more call where kernels do not reach; all of them must be the same to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.loadtest.command import add_line
from quire.loadtest.rank_processes import graph_seconds, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from quire.engine.parallel.group import RankGroup

KIB = (8, 32, 72, 128, 256, 512, 1024, 1660, 2048, 4096, 8192, 32768)
HIDDEN = 4096


def measure(group: RankGroup, store_path: str, json_path: Path | None) -> None:
    """Time every way of every size; all ranks do, and rank 0 tells its times as they come."""
    import torch

    rank, size, device = group.rank, group.size, group.device
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
            "nccl": partial(group.library_sum, x),
            "nccl_then_norm": partial(_nccl_then_norm, group, x, residual, weight),
            "gathered": partial(group.gathered_sum, x),
            "sliced": partial(group.sliced_sum, x),
            "ours": partial(group.all_reduce, x),
            "ours_with_norm": partial(group.add_rms_norm, x, residual, weight, 1e-5),
            **{name: make(x) for name, make in symmetric.items()},
        }
        expected = group.gathered_sum(x)
        for name, way in (("sliced", group.sliced_sum), ("ours", group.all_reduce)):
            if not torch.equal(way(x.clone()), expected):
                raise RuntimeError(f"{name} at {kib} KiB is not the sum in the order of the ranks")
        for name, call in ways.items():
            try:
                microseconds = graph_seconds(call, group) * 1e6
            except RuntimeError as error:
                print(f"{name} at {kib} KiB: {error}", file=sys.stderr)
                continue
            if rank == 0:
                add_line({"way": name, "kib": kib, "us": round(microseconds, 2), "ranks": size}, json_path)


def _nccl_then_norm(group: RankGroup, x: Tensor, residual: Tensor, weight: Tensor) -> object:
    from quire.kernels.pointwise.norm import add_rms_norm

    return add_rms_norm(group.library_sum(x), residual, weight, 1e-5)


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


if __name__ == "__main__":
    sys.exit(run_ranks(__doc__, measure))
