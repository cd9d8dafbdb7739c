"""Time sums over ranks that are streams of one GPU, beside a copy: `python -m quire.loadtest.one_gpu_sums`.

No link is in it: what is left is launches, and the way through the GPU's own memory. An ordinary kernel is
behind each call, in all ways alike: sums launch each other early, and a whole chain of them that waits for
another rank would leave that one no room on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.parallel.all_reduce import TILE, one_shot, two_shot
from quire.kernels.parallel.buffers import SymmetricBuffers, buffers_on_one_device
from quire.loadtest.command import add_line, command_parser, parse_for_cuda

HIDDEN, CALLS, REPLAYS = 4096, 32, 20
ROWS = (1, 9, 16, 64, 128, 512)
PROGRAMS = 96  # of all ranks together: they must fit at once
POLLS = 1_000_000  # looks, after which what is missing is NaN: a hang ends within seconds

Way = Callable[[Tensor, SymmetricBuffers], Tensor]


def copied(x: Tensor, buffers: SymmetricBuffers) -> Tensor:
    """Copy x: the least that a sum could take."""
    return x.clone()


def microseconds(ranks: int, rows: int, way: Way) -> float:
    """Return what a call takes, with all ranks side by side, in graphs."""
    device, units = torch.device("cuda"), 2 * ranks * (rows * HIDDEN + TILE)
    programs = PROGRAMS // ranks
    idle, *_ = buffers_on_one_device(ranks, units, device, programs=programs, most_polls=1)
    buffers = buffers_on_one_device(ranks, units, device, programs=programs, most_polls=POLLS)
    terms = torch.randn(ranks, rows, HIDDEN, device=device).bfloat16()
    way(terms[0], idle)  # loads the kernel, which could hang while another rank waits
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    graphs, results = [], []
    for stream, x, own in zip(streams, terms, buffers, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                result = way(x, own).clone()
        graphs.append(graph)
        results.append(result)
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    if any(result.isnan().any() for result in results):
        raise RuntimeError(f"{ranks} ranks, {rows} rows: a rank waited in vain")
    return sorted(times)[REPLAYS // 2]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--json", type=Path, help="add a line for each time to this file")
    arguments = parse_for_cuda(parser)
    ways: dict[str, Way] = {"copy": copied, "one_shot": one_shot, "two_shot": two_shot}
    for ranks in (2, 4, 8):
        for rows in ROWS:
            for name, way in ways.items():
                line = {"way": name, "ranks": ranks, "kib": rows * HIDDEN * 2 // 1024}
                add_line(line | {"us": round(microseconds(ranks, rows, way), 2)}, arguments.json)


if __name__ == "__main__":
    main()
