"""Time ways to divide a product of few tokens: `python -m quire.loadtest.gpu_tilings 1152x6912 --tokens 8`.

Of each weight OUTPUTSxINPUTS, every tiling that `linear.hopper_stream` may take, beside the one that it
chooses and cuBLAS: between two norms, as layers have it, in a CUDA graph over weights that the L2 cache does
not hold together. Prints microseconds of a product with its norm, and what reading the weight takes at the
rate of a large copy. Needs one Hopper GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from quire.kernels.compiling import compiling_beside, only_compiled
from quire.kernels.linear import hopper_stream
from quire.kernels.linear.hopper_stream import Tiling
from quire.kernels.pointwise.activation import silu_mul
from quire.kernels.pointwise.norm import add_rms_norm, rms_norm
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.gpu_layer import graph_seconds
from quire.loadtest.offline.roofline import measure_ceilings

Kind: TypeAlias = Literal["in", "gate", "out"]
KINDS: dict[str, Kind] = {"in": "in", "gate": "gate", "out": "out"}
BEYOND_CACHE = 150 << 20  # bytes of all weights
SHARED = (48 << 10, 96 << 10, 109 << 10, 192 << 10)  # of a program's stages
MOST_SPLITS = 8
EPS = 1e-6
SHOWN = 4  # tilings of each product that are printed


@dataclass(frozen=True, slots=True)
class Product:
    """`tokens` times a weight [outputs, inputs]: a gate and an up projection's has outputs of both.

    in: into attention. gate: with its activation. out: added to the residual, its sums may be divided.
    """

    kind: Kind
    tokens: int
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Timing:
    """tiling: None where cuBLAS multiplied. chosen: it is what serving takes."""

    product: Product
    tiling: Tiling | None
    chosen: bool
    microseconds: float


def tilings(product: Product) -> Iterator[Tiling]:
    """Yield the tilings that `linear.hopper_stream` can take, but for those with idle programs."""
    gated = product.kind == "gate"
    outputs = product.outputs // 2 if gated else product.outputs
    if product.inputs % hopper_stream.CHUNK:
        return
    least = max(16, min(1 << (product.tokens - 1).bit_length(), 256))
    sizes = {least, 64} if least <= 64 else {64, 128, least}
    shared = SHARED if least <= 64 else SHARED[1::2]
    most_splits = MOST_SPLITS if least <= 64 else hopper_stream.MOST_SPLITS
    columns = (hopper_stream.CHUNK,) if least <= 64 else (hopper_stream.CHUNK // 2, hopper_stream.CHUNK)
    for tokens, chunk in itertools.product(sorted(sizes), columns):
        # The tensor cores' first operand has 64 rows, and a warp has both a gate and its up.
        for rows in (64, 128) if tokens < 64 else (32, 64, 128):
            if outputs % (rows // 2 if gated else rows) or (gated and tokens < 64 and rows < 128):
                continue
            for splits in range(1, most_splits + 1 if product.kind == "out" else 2):
                chunks = product.inputs // chunk // splits
                if splits > 1 and chunks < 4:
                    continue
                stages = {min(each // ((tokens + rows) * chunk * 2), chunks + 1) for each in shared}
                for count in sorted(stages - {0, 1}):
                    yield Tiling(tokens, rows, chunk, count, splits)


def chosen(product: Product) -> Tiling | None:
    """Return what serving takes; None is cuBLAS."""
    gated, divided = product.kind == "gate", product.kind == "out"
    return hopper_stream.tiling(product.tokens, product.outputs, product.inputs, gated=gated, divided=divided)


class Layers:
    """Weights and inputs of a product, as many as do not fit into the L2 cache together."""

    def __init__(self, product: Product, device: torch.device) -> None:
        self._kind = product.kind
        shape = (product.outputs, product.inputs)
        count = BEYOND_CACHE // (2 * product.outputs * product.inputs) + 1
        self._weights = [
            torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(product.inputs**-0.5)
            for _ in range(count)
        ]
        self._x = torch.randn(product.tokens, product.inputs, device=device, dtype=torch.bfloat16)
        residual = (product.tokens, product.outputs if product.kind == "out" else product.inputs)
        self._residual = torch.randn(residual, device=device, dtype=torch.bfloat16)
        self._norm = torch.ones(residual[1], device=device, dtype=torch.bfloat16)

    def __len__(self) -> int:
        return len(self._weights)

    def run(self, tiles: Tiling | None) -> None:
        """Run all: a norm and the product behind it, or the product and the norm behind that."""
        for weight in self._weights:
            if self._kind == "out":
                self._add(weight, tiles)
            else:
                self._multiply(rms_norm(self._residual, self._norm, EPS), weight, tiles)

    def _add(self, weight: Tensor, tiles: Tiling | None) -> None:
        if tiles is None:
            product = self._x @ weight.T
        else:
            product = hopper_stream.hopper_linear_parts(self._x, weight, tiles)
        add_rms_norm(product, self._residual, self._norm, EPS)

    def _multiply(self, x: Tensor, weight: Tensor, tiles: Tiling | None) -> None:
        if self._kind == "gate":
            if tiles is None:
                silu_mul(x @ weight.T)
            else:
                hopper_stream.hopper_gated_linear(x, weight, tiles, "silu")
        elif tiles is None:
            _ = x @ weight.T
        else:
            hopper_stream.hopper_linear(x, weight, None, tiles)


def time_product(product: Product, device: torch.device) -> list[Timing]:
    """Time all tilings of a product and cuBLAS; the quickest first."""
    layers, choice = Layers(product, device), chosen(product)
    ways: list[Tiling | None] = [None, *tilings(product)]
    if choice not in ways:
        ways.append(choice)
    with compiling_beside(lambda done, total: None), only_compiled():
        for tiles in ways[1:]:
            layers.run(tiles)
    found = []
    for tiles in ways:
        seconds = _seconds(partial(layers.run, tiles))
        found.append(Timing(product, tiles, tiles == choice, round(1e6 * seconds / len(layers), 2)))
    return sorted(found, key=lambda each: each.microseconds)


def _seconds(run: Callable[[], None]) -> float:
    with torch.inference_mode():
        return graph_seconds(run)


def _product(text: str) -> tuple[Kind, int, int]:
    """Parse `KIND:OUTPUTSxINPUTS`, of what is added to the residual without a kind."""
    named, _, shape = text.rpartition(":")
    kind = KINDS.get(named or "out")
    outputs, _, inputs = shape.partition("x")
    if kind is None or not (outputs.isdecimal() and inputs.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not [{'|'.join(KINDS)}:]OUTPUTSxINPUTS")
    return kind, int(outputs), int(inputs)


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument(
        "products",
        nargs="+",
        type=_product,
        metavar="[KIND:]OUTPUTSxINPUTS",
        help=f"weights; the kind is one of {', '.join(KINDS)} (out), of a gate OUTPUTS are both projections'",
    )
    parser.add_argument("--tokens", default="8", help="how many, by commas (8)")
    parser.add_argument("--json", type=Path, help="where one JSON object goes, anew after each product")
    arguments = parse_for_cuda(parser)
    device = torch.device("cuda")
    bandwidth = measure_ceilings(device, torch.bfloat16).bandwidth
    timings: list[Timing] = []
    for kind, outputs, inputs in arguments.products:
        for tokens in map(int, arguments.tokens.split(",")):
            product = Product(kind, tokens, outputs, inputs)
            found = time_product(product, device)
            bound = 1e6 * 2 * outputs * inputs / bandwidth
            print(f"{kind} {outputs}x{inputs}, {tokens} tokens: {bound:.2f} µs to read", flush=True)
            for rank, each in enumerate(found):
                if rank < SHOWN or each.chosen or each.tiling is None:
                    mark = "chosen" if each.chosen else ""
                    print(f"  {each.microseconds:8.2f} µs  {each.tiling or 'cuBLAS'} {mark}", flush=True)
            timings += found
            figures = {"bandwidth": bandwidth, "timings": [asdict(each) for each in timings]}
            write_json(arguments.json, torch.cuda.get_device_name(), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
