"""Times a layer's experts: `python -m quire.loadtest.gpu_experts [--json PATH] [--tiles] [--pieces]`.

Needs a CUDA device. Layers are as Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-20b have them, with random
routers, in CUDA graphs: which experts are chosen, and their products; beside torch's `grouped_mm` with what
it needs around it. The bound is the longer of two: reading the weights of the experts that are asked at the
rate of a large copy, and the products' arithmetic at the rate of a large product, both measured in the same
process. `--tiles` tries other tiles of the grouped products, too, and `--pieces` other pieces of few tokens'.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.experts.experts import experts, experts_reference
from quire.kernels.experts.few import Pieces, few_experts, pieces_of
from quire.kernels.experts.gating import gated_reference
from quire.kernels.experts.grouped import Tile, Tiles, grouped_experts, tiles_of
from quire.kernels.experts.routing import Divisor, Routing, route
from quire.kernels.experts.weights import Experts
from quire.kernels.gpu import gpu_of
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.device_time import capture, replay_seconds
from quire.loadtest.offline.roofline import Ceilings, measure_ceilings

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 8192)
ROUNDS = 7
PIECES = (256, 512, 1024, 2048)
MOST_BYTES = 12e9  # of layers with weights of their own


@dataclass(frozen=True, slots=True)
class Shape:
    count: int
    top: int
    hidden: int
    inner: int
    clamped: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, clamped=True),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds are a layer's; error is of the result's length, against fp32. few: row by row."""

    model: str
    tokens: int
    microseconds: float
    few_microseconds: float | None
    grouped_microseconds: float
    torch_microseconds: float
    bound_microseconds: float
    share: float
    error: float


def random_experts(shape: Shape) -> Experts:
    def random(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16) / math.sqrt(size[-1])

    found = Experts(
        random(shape.count, 2 * shape.inner, shape.hidden), random(shape.count, shape.hidden, shape.inner)
    )
    if not shape.clamped:
        return found
    biases = random(shape.count, 2 * shape.inner), random(shape.count, shape.hidden)
    return replace(found, gate_up_bias=biases[0], down_bias=biases[1], interleaved=True, activation="clamped",
                   alpha=1.702, limit=7.0)  # fmt: skip


def by_torch(x: Tensor, index: Tensor, weights: Tensor, found: Experts) -> Tensor:
    """Compute experts by grouped_mm, as transformers does."""
    top = index.shape[1]
    expert, order = index.flatten().sort()
    ends = torch.histc(expert.int(), found.count, 0, found.count - 1).cumsum(0, dtype=torch.int32)
    gate_up = torch.nn.functional.grouped_mm(x[order // top], found.gate_up.transpose(1, 2), offs=ends)
    if found.gate_up_bias is not None:
        gate_up = gate_up + found.gate_up_bias[expert]
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if found.interleaved else gate_up.chunk(2, dim=1)
    inner = gated_reference(gate, up, found)
    out = torch.nn.functional.grouped_mm(inner, found.down.transpose(1, 2), offs=ends)
    if found.down_bias is not None:
        out = out + found.down_bias[expert]
    out = out * weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return out[back].view(len(x), top, -1).sum(1).to(x.dtype)


def bound(shape: Shape, index: Tensor, ceilings: Ceilings) -> float:
    """Return the seconds that reading what is asked takes, or computing it if that is longer."""
    asked = len(index.unique())
    size = 3 * shape.hidden * shape.inner
    return max(2 * asked * size / ceilings.bandwidth, 2 * index.numel() * size / ceilings.flops)


def measure(
    name: str,
    shape: Shape,
    tokens: int,
    layers: list[Experts],
    ceilings: Ceilings,
    *,
    tiles: bool,
    pieces: bool,
) -> Timing:
    x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    logits = [torch.randn(tokens, shape.count, device="cuda", dtype=torch.bfloat16) for _ in layers]
    routing = Routing(shape.top, divisor=Divisor())
    routed = [route(each, routing, None, x.dtype) for each in logits]

    def seconds(compute: Callable[..., Tensor], *, routes: bool = True) -> float:
        def one(layer: int) -> Tensor:
            weights, index = routed[layer]
            if routes:
                weights, index = route(logits[layer], routing, None, x.dtype)
            return compute(x, index, weights, layers[layer])

        graph = capture([partial(one, layer) for layer in range(len(layers))])
        return statistics.median(replay_seconds(graph, ROUNDS)) / len(layers)

    weights, index = routed[0]
    few = seconds(few_experts) if tokens <= 16 else None
    grouped, torchs, ours = seconds(grouped_experts), seconds(by_torch), seconds(experts)
    if tiles and tokens > 1:
        try_tiles(tokens, shape, partial(seconds, routes=False))
    if pieces and few is not None:
        try_pieces(shape, seconds)
    few_rows = slice(0, min(tokens, 64))
    result = experts(x, index, weights, layers[0])[few_rows].float()
    exact = experts_reference(
        x[few_rows].float(), index[few_rows], weights[few_rows].float(), wide(layers[0])
    )
    least = sum(bound(shape, each, ceilings) for _, each in routed) / len(routed)
    return Timing(
        name, tokens, 1e6 * ours, None if few is None else 1e6 * few, 1e6 * grouped, 1e6 * torchs,
        1e6 * least, round(least / ours, 3), float((result - exact).norm() / exact.norm()),
    )  # fmt: skip


def wide(found: Experts) -> Experts:
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    parts = {name: getattr(found, name) for name in names}
    return replace(found, **{name: part.float() for name, part in parts.items() if part is not None})


def try_tiles(tokens: int, shape: Shape, seconds: Callable[[Callable[..., Tensor]], float]) -> None:
    """Print the quickest tiles of each product, the other's being as they are."""
    usual = tiles_of(tokens * shape.top, shape.count, torch.bfloat16, gpu_of(torch.device("cuda")))
    mean = tokens * shape.top / shape.count
    rows = [each for each in (16, 32, 64, 128) if mean / 4 <= each <= max(8 * mean, 16)] or [128]
    sizes = itertools.product(rows, (32, 64, 128, 256), (64, 128), (4, 8), (2, 3, 4, 5))
    found: dict[str, list[tuple[float, Tile]]] = {"up": [], "down": []}
    for each, outputs, columns, warps, stages in sizes:
        tile = Tile(each, outputs, columns, warps, stages)
        for part, times in found.items():
            held = (each + (2 if part == "up" else 1) * outputs) * columns * 2 * stages
            sums = each * outputs * (2 if part == "up" else 1) // (32 * warps)
            if held > 220_000 or sums > 160 or (each <= 32 and warps == 8) or (mean < 64 and held < 40_000):
                continue
            changed: Tiles = replace(usual, **{part: tile})
            try:
                times.append((seconds(partial(grouped_experts, tiles=changed)), tile))
            except Exception as error:  # it may not fit
                print(f"  {part} {tile}: {type(error).__name__}", flush=True)
    for part, times in found.items():
        for time, tile in sorted(times, key=lambda each: each[0])[:4]:
            print(f"  {part:5} {1e6 * time:9.1f} µs {tile}", flush=True)


def try_pieces(shape: Shape, seconds: Callable[[Callable[..., Tensor]], float]) -> None:
    """Print how long each pair of pieces takes in which few tokens' weights may be read."""
    usual = pieces_of(shape.hidden, shape.inner)
    sizes = {Pieces(up, usual.down) for up in PIECES if up < 2 * shape.hidden}
    sizes |= {Pieces(usual.up, down) for down in PIECES if down < 2 * shape.inner}
    for each in sorted(sizes, key=lambda each: (each.up, each.down)):
        microseconds = 1e6 * seconds(partial(few_experts, pieces=each))
        print(f"  up {each.up:5} down {each.down:5} {microseconds:9.1f} µs", flush=True)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--json", type=Path, help="also write the timings to this file")
    parser.add_argument("--tiles", action="store_true", help="try other tiles")
    parser.add_argument("--pieces", action="store_true", help="try other pieces of few tokens' weights")
    parser.add_argument("--models", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="how many tokens, with commas")
    arguments = parse_for_cuda(parser)
    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, bf16, {ceilings.bandwidth / 1e12:.2f} TB/s, "
          f"{ceilings.flops / 1e12:.0f} TFLOP/s")  # fmt: skip
    print(f"{'model':16}{'tokens':>7}{'µs':>10}{'few':>10}{'grouped':>10}{'torch':>10}{'bound':>10}"
          f"{'reached':>9}{'error':>10}")  # fmt: skip
    timings = []
    with torch.inference_mode():
        for name in arguments.models.split(","):
            shape = SHAPES[name]
            layer_bytes = 6 * shape.count * shape.hidden * shape.inner
            layers = [random_experts(shape) for _ in range(max(int(MOST_BYTES // layer_bytes), 2))]
            for tokens in map(int, arguments.tokens.split(",")):
                timing = measure(
                    name, shape, tokens, layers, ceilings, tiles=arguments.tiles, pieces=arguments.pieces
                )
                timings.append(timing)
                few = "-" if timing.few_microseconds is None else f"{timing.few_microseconds:.1f}"
                print(
                    f"{name:16}{tokens:7}{timing.microseconds:10.1f}{few:>10}{timing.grouped_microseconds:10.1f}"
                    f"{timing.torch_microseconds:10.1f}{timing.bound_microseconds:10.1f}{timing.share:9.0%}"
                    f"{timing.error:10.1e}",
                    flush=True,
                )
            del layers
    timed = {"ceilings": asdict(ceilings), "timings": [asdict(timing) for timing in timings]}
    write_json(arguments.json, torch.cuda.get_device_name(), timed)


if __name__ == "__main__":
    main()
