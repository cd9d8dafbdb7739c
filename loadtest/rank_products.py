"""Time products of many rows whose sums go over two ranks: `python -m quire.loadtest.rank_products`.

The output and the down projection of Llama-3.1-8B and Qwen3-14B, half of whose inputs each rank has, with the
residual's addition and the norm: in pieces that are copied while the next are multiplied (`pieces`), and the
whole product, then NCCL's sum and the norm (`whole`). `product` is the product alone. Launched as the engine
launches them, several layers in a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.loadtest.command import add_line
from quire.loadtest.rank_processes import run_ranks

if TYPE_CHECKING:
    from quire.engine.parallel.group import RankGroup

SHAPES = ((4096, 2048), (4096, 7168), (5120, 2560), (5120, 8704))  # outputs, a rank's inputs
ROWS = (2112, 4224, 8192)
LAYERS, ROUNDS = 8, 5
IDLE_CYCLES = 8_000_000  # four milliseconds


def measure(group: RankGroup, _: str, json_path: Path | None) -> None:
    """Time each way; rank 0 tells its times as they come, and how many of the sums differ."""
    import torch

    from quire.kernels.gpu import gpu_of
    from quire.kernels.linear import hopper_matmul
    from quire.kernels.linear.linear import Matrix

    rank, size, device = group.rank, group.size, group.device
    alone = group.without_peers()
    generator = torch.Generator(device).manual_seed(rank)
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs, generator=generator, device=device).bfloat16() / inputs**0.5
        norm = torch.ones(outputs, device=device, dtype=torch.bfloat16)
        ours = hopper_matmul.supports(gpu_of(device), weight.dtype, Matrix(outputs, inputs))
        multiply: Callable[[torch.Tensor], torch.Tensor] = partial(torch.nn.functional.linear, weight=weight)
        if ours and inputs > outputs:  # as recipes have it
            multiply = partial(hopper_matmul.hopper_matmul, weight=weight)
        for rows in ROWS:
            x = torch.randn(rows, inputs, generator=generator, device=device).bfloat16()
            zeros = torch.zeros(rows, outputs, device=device, dtype=torch.bfloat16)
            residuals = [zeros.clone(), zeros.clone()]
            normed = [
                each.add_rms_norm_of(multiply, x, residual, norm, 1e-5)[0]
                for each, residual in zip((group, alone), residuals, strict=True)
            ]
            differ = [int((one != other).sum()) for one, other in (residuals, normed)]
            line: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "rows": rows, "ranks": size}
            line |= {"sums_that_differ": differ[0], "normed_that_differ": differ[1]}
            ways: dict[str, Callable[[], object]] = {
                "pieces": partial(group.add_rms_norm_of, multiply, x, zeros, norm, 1e-5),
                "whole": partial(alone.add_rms_norm_of, multiply, x, zeros, norm, 1e-5),
                "product": partial(multiply, x),
            }
            line |= {f"{way}_us": round(_seconds(call, group) * 1e6, 1) for way, call in ways.items()}
            if rank == 0:
                add_line(line, json_path)


def _seconds(call: Callable[[], object], group: RankGroup) -> float:
    """Return what a call takes of several that follow each other, the median of some rounds."""
    import torch

    call()
    taken = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        group.barrier()
        torch.cuda._sleep(IDLE_CYCLES)  # that all is launched when it begins
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(LAYERS):
            call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / LAYERS)
    return sorted(taken)[ROUNDS // 2]


if __name__ == "__main__":
    sys.exit(run_ranks(__doc__, measure))
