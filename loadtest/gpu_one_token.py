"""Time ways to compute one token's products: `python -m quire.loadtest.gpu_one_token [--models NAME,…]`.

Each of a layer's products in turn is computed by `linear.gemv` in every division that it can take, and by
`linear.hopper_gemv` with some rows and warps a program, the others as serving computes them: within the
model's own layers, in a CUDA graph, since what is quickest alone often is not behind and before others. The
models are native ones of `quire.loadtest.shape_configs`, with dummy weights. Prints microseconds of a layer.
Needs one CUDA device.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from quire.engine.models.config import ModelConfig
from quire.engine.models.loader import Model, load_model
from quire.engine.models.native_config import has_native, read_native
from quire.kernels import plan
from quire.kernels.backend import Backend, triton_backend
from quire.kernels.formats.kv_format import BF16, FP12, KVFormat
from quire.kernels.linear import gemv, hopper_gemv, skinny
from quire.kernels.linear.gemv import Tiles, tiles_of_one
from quire.kernels.linear.linear import Matrix
from quire.kernels.plan import plan_attention, plan_layer
from quire.kernels.tuning import H100, Tuning
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.gpu_layer import LONGEST, measure
from quire.loadtest.model_configs import write_model_folder
from quire.loadtest.shape_configs import DENSE, OTHERS

CONFIGS = {name: config for name, config in {**DENSE, **OTHERS}.items() if has_native(config)}
CONTEXT = 544  # tokens
MOST_LAYERS = 12
FORMATS = {each.name: each for each in (BF16, FP12)}
ROWS, CHUNKS, HELD = (1, 2, 4, 8), (512, 1024, 2048, 4096), (8, 16, 32)
ROWS_AND_WARPS_IN_SHARED = ((2, 2), (4, 2), (8, 2), (4, 4), (8, 4), (8, 8))
MOST_WARPS = 16
MOST_SHARED = 224 * 1024  # bytes of weights: a program has little else in shared memory
SHOWN = 4  # ways of each product that are printed


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [outputs, columns] of a layer, or a gate and an up projection of that shape each."""

    outputs: int
    columns: int
    gated: bool


@dataclass(frozen=True, slots=True)
class InShared:
    """A product by `linear.hopper_gemv`, with so many rows and warps a program."""

    rows: int
    warps: int


Way = Tiles | InShared | None  # None: as serving computes it


@dataclass(frozen=True, slots=True)
class Timing:
    """microseconds: of a layer."""

    model: str
    cache: str
    product: Product
    way: Way
    microseconds: float


def ways(product: Product) -> Iterator[Way]:
    """Yield serving's way, then those that a program has threads, registers and shared memory for."""
    yield None
    weights = 2 if product.gated else 1
    for rows, chunk, held in itertools.product(ROWS, CHUNKS, HELD):
        warps, registers = 2 * chunk // (64 * held), weights * rows * held
        if 1 <= warps <= MOST_WARPS and 8 <= registers <= 128 and chunk < 2 * product.columns:
            yield Tiles(rows, chunk, held)
    for rows, warps in ROWS_AND_WARPS_IN_SHARED:
        if hopper_gemv.division(product.outputs, product.columns, plain=False) is None:
            return
        shared = weights * rows * product.columns * torch.bfloat16.itemsize
        if product.outputs % rows == 0 and shared <= MOST_SHARED:
            yield InShared(rows, warps)


@contextmanager
def noted() -> Iterator[dict[Product, None]]:
    """Note the products of one token that are planned meanwhile, in their order."""
    products: dict[Product, None] = {}
    asked = hopper_gemv.prefers

    def prefers(weight: Matrix, tuning: Tuning, *, gated: bool, hidden: int) -> bool:
        products[_product(weight, gated=gated)] = None
        return asked(weight, tuning, gated=gated, hidden=hidden)

    with planned_anew(), mock.patch.object(hopper_gemv, "prefers", prefers):
        yield products


@contextmanager
def computed(product: Product, way: Way) -> Iterator[None]:
    """Have one token's products of that shape computed so."""
    by_tiles, by_shared = isinstance(way, Tiles), isinstance(way, InShared)
    prefers, prefers_one, division = hopper_gemv.prefers, skinny.prefers_one, hopper_gemv.division

    def held(weight: Matrix, tuning: Tuning, *, gated: bool, hidden: int) -> bool:
        same = way is not None and _product(weight, gated=gated) == product
        return by_shared if same else prefers(weight, tuning, gated=gated, hidden=hidden)

    def skinny_of_one(weight: Matrix, tuning: Tuning) -> bool:
        same = by_tiles and _product(weight, gated=product.gated) == product
        return not same and prefers_one(weight, tuning)

    def tiles_of(outputs: int, columns: int, *, gated: bool) -> Tiles:
        same = Product(outputs, columns, gated) == product
        return way if isinstance(way, Tiles) and same else tiles_of_one(outputs, columns, gated=gated)

    def division_of(outputs: int, columns: int, *, plain: bool) -> hopper_gemv.Division | None:
        found = division(outputs, columns, plain=plain)
        same = (outputs, columns) == (product.outputs, product.columns)
        if found and same and isinstance(way, InShared):
            return replace(found, rows=way.rows, warps=way.warps)
        return found

    with planned_anew(), ExitStack() as patches:
        for module, name, function in (
            (hopper_gemv, "prefers", held),
            (hopper_gemv, "division", division_of),
            (skinny, "prefers_one", skinny_of_one),
            (gemv, "tiles_of_one", tiles_of),
        ):
            patches.enter_context(mock.patch.object(module, name, function))
        yield


@contextmanager
def planned_anew() -> Iterator[None]:
    """Forget what was planned, before and after; meanwhile one token is fused on any card."""
    _forget()
    try:
        with mock.patch.object(plan, "tuning_of", lambda gpu: H100):
            yield
    finally:
        _forget()


def _forget() -> None:
    plan_layer.cache_clear()
    plan_attention.cache_clear()


def _product(weight: Matrix, *, gated: bool) -> Product:
    return Product(weight.outputs // 2 if gated else weight.outputs, weight.inputs, gated)


def time_products(
    name: str, model: Model, config: ModelConfig, backend: Backend, held: KVFormat
) -> list[Timing]:
    """Time all ways to compute a model's products; each product's quickest come first."""

    def time() -> float:
        return round(measure(name, model, config, backend, 1, CONTEXT, "equal", held).microseconds, 2)

    with noted() as products:
        time()
    timings: list[Timing] = []
    for product in products:
        found: list[Timing] = []
        for way in ways(product):
            with computed(product, way):
                found.append(Timing(name, held.name, product, way, time()))
        timings += sorted(found, key=lambda each: each.microseconds)
    return timings


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--models", default=",".join(OTHERS), help=f"some of {', '.join(CONFIGS)}")
    parser.add_argument("--json", type=Path, help="where one JSON object goes, anew after each model")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=FORMATS,
        default=BF16.name,
        help=f"as `quire serve` takes it ({BF16.name})",
    )
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
                Path(folder), config, backend, device="cuda", dtype=torch.bfloat16, max_model_len=LONGEST,
                load_format="dummy",
            )  # fmt: skip
            found = time_products(name, model, config, backend, FORMATS[arguments.kv_cache_dtype])
        for product, alike in itertools.groupby(found, key=lambda each: each.product):
            print(f"{name} {product}", flush=True)
            for rank, each in enumerate(alike):
                if rank < SHOWN or each.way is None:
                    print(f"  {each.microseconds:8.2f} µs  {each.way or 'as served'}", flush=True)
        timings += found
        figures = {"timings": [asdict(each) for each in timings]}
        write_json(arguments.json, torch.cuda.get_device_name(), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
