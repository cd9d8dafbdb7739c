"""Every division of one token's products that is timed can run, and serving's is the first of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.models.native_config import read_native
from quire.kernels.linear import gemv
from quire.kernels.linear.gemv import Tiles, tiles_of_one
from quire.loadtest.gpu_one_token import Product, divided, divisions, products_of
from quire.loadtest.model_configs import write_model_folder
from quire.loadtest.shape_configs import UNTUNED


@pytest.mark.parametrize("name", UNTUNED)
def test_products_are_those_of_the_models_layers(name: str, tmp_path: Path) -> None:
    write_model_folder(tmp_path, UNTUNED[name])
    config = read_native(tmp_path)
    products = products_of(config, UNTUNED[name]["intermediate_size"])
    weights = sum((1 + each.gated) * each.outputs * each.columns for each in products)
    assert weights == config.layer_weights
    for product in products:
        found = list(divisions(product))
        assert len(found) == len(set(found)) > 4
        assert found[0] == tiles_of_one(product.outputs, product.columns, gated=product.gated)
        for tiles in found:
            warps = tiles.chunk * 2 // (64 * tiles.held)
            assert warps in (0, 1, 2, 4, 8, 16)


def test_one_products_division_is_replaced_and_no_others() -> None:
    product, tiles = Product("down", 6, 200), Tiles(2, 64, 8)
    with divided(product, tiles):
        assert gemv.tiles_of_one(6, 200, gated=False) == tiles
        for outputs, columns, gated in ((6, 200, True), (7, 200, False), (6, 201, False)):
            chosen = tiles_of_one(outputs, columns, gated=gated)
            assert gemv.tiles_of_one(outputs, columns, gated=gated) == chosen
    assert gemv.tiles_of_one is tiles_of_one
