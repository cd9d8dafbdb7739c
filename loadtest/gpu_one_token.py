"""Time ways to divide one token's products: `python -m quire.loadtest.gpu_one_token [--models NAME,…]`.

Of a layer's products that `linear.gemv` computes, each in turn has every division that it can take, the
others what serving takes: within the model's own layers, in a CUDA graph, since what is quickest alone often
is not behind and before other kernels. The models are native ones of `quire.loadtest.shape_configs`, with
dummy weights. Prints microseconds of a layer. Needs one CUDA device.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

from quire.engine.models.config import ModelConfig
from quire.engine.models.loader import Model, load_model
from quire.engine.models.native_config import has_native, read_native
from quire.kernels.backend import Backend, triton_backend
from quire.kernels.linear import gemv
from quire.kernels.linear.gemv import Tiles, tiles_of_one
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.gpu_layer import measure
from quire.loadtest.model_configs import write_model_folder
from quire.loadtest.shape_configs import DENSE, OTHERS

CONFIGS = {name: config for name, config in {**DENSE, **OTHERS}.items() if has_native(config)}
CONTEXT = 544  # tokens
MOST_LAYERS = 12
ROWS, CHUNKS, HELD = (1, 2, 4, 8), (512, 1024, 2048, 4096), (8, 16, 32)
MOST_WARPS = 16
SHOWN = 4  # divisions of each product that are printed


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [outputs, columns] of a layer, or a gate and an up projection of that shape each."""

    outputs: int
    columns: int
    gated: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """tiles: those of `product`. chosen: they are what serving takes. microseconds: of a layer."""

    model: str
    product: Product
    tiles: Tiles
    chosen: bool
    microseconds: float


def divisions(product: Product) -> Iterator[Tiles]:
    """Yield what serving takes, then the others that a program has threads and registers for."""
    chosen = tiles_of_one(product.outputs, product.columns, gated=product.gated)
    yield chosen
    weights = 2 if product.gated else 1
    for rows, chunk, held in itertools.product(ROWS, CHUNKS, HELD):
        warps, registers = 2 * chunk // (64 * held), weights * rows * held
        tiles = Tiles(rows, chunk, held)
        if (
            1 <= warps <= MOST_WARPS
            and 8 <= registers <= 128
            and chunk < 2 * product.columns
            and tiles != chosen
        ):
            yield tiles


@contextmanager
def noted() -> Iterator[dict[Product, None]]:
    """Note the products that `linear.gemv` computes meanwhile, in their order."""
    products: dict[Product, None] = {}

    def tiles_of(outputs: int, columns: int, *, gated: bool) -> Tiles:
        products[Product(outputs, columns, gated)] = None
        return tiles_of_one(outputs, columns, gated=gated)

    with mock.patch.object(gemv, "tiles_of_one", tiles_of):
        yield products


@contextmanager
def divided(product: Product, tiles: Tiles) -> Iterator[None]:
    """Have one token's products of that shape divided so."""

    def tiles_of(outputs: int, columns: int, *, gated: bool) -> Tiles:
        same = Product(outputs, columns, gated) == product
        return tiles if same else tiles_of_one(outputs, columns, gated=gated)

    with mock.patch.object(gemv, "tiles_of_one", tiles_of):
        yield


def time_products(name: str, model: Model, config: ModelConfig, backend: Backend) -> list[Timing]:
    """Time all divisions of a model's products; each product's quickest come first."""

    def time() -> float:
        return round(measure(name, model, config, backend, 1, CONTEXT, "equal").microseconds, 2)

    with noted() as products:
        time()
    timings: list[Timing] = []
    for product in products:
        found: list[Timing] = []
        for tiles in divisions(product):
            with divided(product, tiles):
                found.append(Timing(name, product, tiles, not found, time()))
        timings += sorted(found, key=lambda each: each.microseconds)
    return timings


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=",".join(OTHERS), help=f"some of {', '.join(CONFIGS)}")
    parser.add_argument("--json", type=Path, help="where one JSON object goes, anew after each model")
    arguments = parse_for_cuda(parser)
    names = arguments.models.split(",")
    if unknown := sorted({*names} - {*CONFIGS}):
        parser.error(f"--models: {', '.join(unknown)} not known; give some of {', '.join(CONFIGS)}")
    backend = triton_backend()
    timings: list[Timing] = []
    for name in names:
        layers = min(CONFIGS[name]["num_hidden_layers"], MOST_LAYERS)
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            write_model_folder(Path(folder), {**CONFIGS[name], "num_hidden_layers": layers})
            config = read_native(Path(folder))
            model, _ = load_model(
                Path(folder), config, backend, device="cuda", dtype=torch.bfloat16, max_model_len=2048,
                load_format="dummy",
            )  # fmt: skip
            found = time_products(name, model, config, backend)
        for product, alike in itertools.groupby(found, key=lambda each: each.product):
            print(f"{name} {product}", flush=True)
            for rank, each in enumerate(alike):
                if rank < SHOWN or each.chosen:
                    mark = " chosen" if each.chosen else ""
                    print(f"  {each.microseconds:8.2f} µs  {each.tiles}{mark}", flush=True)
        timings += found
        figures = {"timings": [asdict(each) for each in timings]}
        write_json(arguments.json, torch.cuda.get_device_name(), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
