"""Ways of one token's products that are timed: which there are, and that each is used in its place."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.kv_format import BF16
from quire.kernels.gpu import KNOWN
from quire.kernels.linear import gemv, hopper_gemv
from quire.kernels.linear.gemv import Tiles, tiles_of_one
from quire.kernels.linear.linear import Matrix
from quire.kernels.plan import plan_layer
from quire.kernels.shapes import LayerShape, StepShape
from quire.loadtest.gpu_one_token import CONFIGS, InShared, Product, Way, computed, noted, ways

HOPPER = next(gpu for gpu in KNOWN.values() if gpu.has_warpgroup_products)
INTO, OUT = Product(4096, 2048, False), Product(2048, 2048, False)
GATE, DOWN = Product(6144, 2048, True), Product(2048, 6144, False)


def planned() -> dict[Product, str]:
    """Plan one token of a layer like Qwen3-1.7B's; return by what kernel each product is computed."""
    layer = LayerShape(
        torch.bfloat16, 16, CacheSpec(8, 128), Matrix(4096, 2048), Matrix(2048, 2048), Matrix(12288, 2048),
        Matrix(2048, 6144), gated=True,
    )  # fmt: skip
    ops = plan_layer(HOPPER, layer, BF16, StepShape(1, 1, None, 0, None, False, 16, 4096))
    assert ops.gate is not None and ops.down is not None
    names = (each.name for each in (ops.project_in, ops.project_out, ops.gate, ops.down))
    return dict(
        zip((INTO, OUT, GATE, DOWN), (name.split("(")[1].split(")")[0] for name in names), strict=True)
    )


@pytest.mark.parametrize("product", [Product(2048, 8192, False), Product(6912, 1152, True)], ids=str)
def test_servings_way_is_the_first_of_many(product: Product) -> None:
    found = list(ways(product))
    assert len(found) == len(set(found)) > 8
    assert found[0] is None
    assert tiles_of_one(product.outputs, product.columns, gated=product.gated) in found
    assert InShared(2, 2) in found
    for way in found:
        if isinstance(way, Tiles):
            assert way.chunk * 2 // (64 * way.held) in (1, 2, 4, 8, 16)
            assert way.chunk < 2 * product.columns


def test_what_does_not_fit_shared_memory_is_not_tried_there() -> None:
    assert not [way for way in ways(Product(2048, 8960, False)) if isinstance(way, InShared)]
    held = {way.rows for way in ways(Product(8192, 8192, True)) if isinstance(way, InShared)}
    assert held == {2, 4}


def test_models_are_native() -> None:
    assert {"qwen3-4b", "qwen3-1.7b", "llama-8b"} <= set(CONFIGS)
    assert not {"gemma-3-1b", "starcoder2-3b", "phi-3-mini"} & set(CONFIGS)


def test_products_are_noted_once_in_their_order() -> None:
    planned()
    with noted() as products:
        planned()
        planned()
    assert list(products) == [INTO, OUT, GATE, DOWN]


@pytest.mark.parametrize("product", [INTO, OUT, GATE, DOWN], ids=str)
@pytest.mark.parametrize("way", [Tiles(2, 64, 8), InShared(8, 4), None], ids=str)
def test_one_product_is_computed_otherwise_and_no_other(product: Product, way: Way) -> None:
    served = planned()
    with computed(product, way):
        found = planned()
        kernels = {Tiles: "linear.gemv", InShared: "linear.hopper_gemv", type(None): served[product]}
        assert found == served | {product: kernels[type(way)]}
        for each in served:
            tiles = gemv.tiles_of_one(each.outputs, each.columns, gated=each.gated)
            own = tiles_of_one(each.outputs, each.columns, gated=each.gated)
            assert tiles == (way if each == product and isinstance(way, Tiles) else own)
            division = hopper_gemv.division(each.outputs, each.columns, plain=False)
            assert division is not None
            asked = (8, 4) if each == product and isinstance(way, InShared) else (2, hopper_gemv.WARPS)
            assert (division.rows, division.warps) == asked
    assert planned() == served
    assert gemv.tiles_of_one is tiles_of_one
