"""Divisions of one token's products that are timed: which there are, and that each is used in its place."""

from __future__ import annotations

import pytest

from quire.kernels.linear import gemv
from quire.kernels.linear.gemv import Tiles, tiles_of_one
from quire.loadtest.gpu_one_token import CONFIGS, Product, divided, divisions, noted


@pytest.mark.parametrize("product", [Product(2048, 8192, False), Product(6912, 1152, True)], ids=str)
def test_servings_division_is_the_first_of_many(product: Product) -> None:
    found = list(divisions(product))
    assert len(found) == len(set(found)) > 8
    assert found[0] == tiles_of_one(product.outputs, product.columns, gated=product.gated)
    for tiles in found:
        warps = tiles.chunk * 2 // (64 * tiles.held)
        assert warps in (1, 2, 4, 8, 16)
        assert tiles.chunk < 2 * product.columns


def test_models_are_native() -> None:
    assert {"qwen3-4b", "qwen3-1.7b", "llama-8b"} <= set(CONFIGS)
    assert not {"gemma-3-1b", "starcoder2-3b", "phi-3-mini"} & set(CONFIGS)


def test_products_are_noted_once_in_their_order() -> None:
    with noted() as products:
        for outputs, columns, gated in ((6, 200, True), (7, 200, False), (6, 200, True)):
            tiles = gemv.tiles_of_one(outputs, columns, gated=gated)
            assert tiles == tiles_of_one(outputs, columns, gated=gated)
    assert list(products) == [Product(6, 200, True), Product(7, 200, False)]


def test_one_products_division_is_replaced_and_no_others() -> None:
    product, tiles = Product(6, 200, False), Tiles(2, 64, 8)
    with divided(product, tiles):
        assert gemv.tiles_of_one(6, 200, gated=False) == tiles
        for outputs, columns, gated in ((6, 200, True), (7, 200, False), (6, 201, False)):
            chosen = tiles_of_one(outputs, columns, gated=gated)
            assert gemv.tiles_of_one(outputs, columns, gated=gated) == chosen
    assert gemv.tiles_of_one is tiles_of_one
