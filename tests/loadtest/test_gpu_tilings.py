"""Every tiling of a product that is timed can run, and the one that serving takes is among them."""

from __future__ import annotations

import argparse

import pytest

from quire.kernels.linear import hopper_stream
from quire.loadtest.gpu_tilings import KINDS, Product, _product, chosen, tilings
from quire.loadtest.shape_configs import DENSE

TOKENS = (2, 8, 17, 33, 64)
SHARED_MEMORY = 227 << 10  # of a Hopper multiprocessor


def products(name: str) -> list[Product]:
    """Return the products of a layer of a configuration."""
    config = DENSE[name]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    shapes = {"in": (heads * head, hidden), "gate": (2 * inner, hidden), "out": (hidden, inner)}
    return [Product(kind, tokens, *shapes[kind]) for kind in KINDS.values() for tokens in TOKENS]


@pytest.mark.parametrize("name", DENSE)
def test_tilings_divide_the_weight_and_have_room(name: str) -> None:
    for product in products(name):
        found = list(tilings(product))
        assert len(found) == len(set(found)) > 0
        for tiles in found:
            rows = tiles.rows // 2 if product.kind == "gate" else tiles.rows
            outputs = product.outputs // 2 if product.kind == "gate" else product.outputs
            assert outputs % rows == 0
            assert product.inputs % tiles.chunk == 0
            assert tiles.tokens >= min(product.tokens, 64)
            assert tiles.rows >= 64 or tiles.tokens >= 64, "the tensor cores' first operand"
            assert 2 <= tiles.stages <= product.inputs // tiles.chunk // tiles.splits + 1
            assert tiles.stages * (tiles.tokens + tiles.rows) * tiles.chunk * 2 <= SHARED_MEMORY
            assert tiles.splits == 1 or product.kind == "out"


@pytest.mark.parametrize("name", DENSE)
def test_what_serving_takes_is_timed(name: str) -> None:
    for product in products(name):
        tiles = chosen(product)
        alike = {(each.tokens, each.rows, each.splits) for each in tilings(product)}
        assert tiles is None or (tiles.tokens, tiles.rows, tiles.splits) in alike


def test_inputs_that_are_no_chunks_have_no_tilings() -> None:
    assert not list(tilings(Product("out", 8, 1024, hopper_stream.CHUNK + 8)))


def test_products_are_named_by_their_kind_and_shape() -> None:
    assert _product("gate:13824x1152") == ("gate", 13824, 1152)
    assert _product("1152x6912") == ("out", 1152, 6912)
    for text in ("down:1x2", "12", "ax3", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="OUTPUTSxINPUTS"):
            _product(text)
