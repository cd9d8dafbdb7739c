"""A layer's products by weights in few bits against fp64: by kernels on a GPU, elsewhere by torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_quantised_weight import draw_numbers, weight_of

from quire.engine.parallel.group import OneOfRanks
from quire.kernels.gpu import gpu_of
from quire.kernels.linear import alone
from quire.kernels.linear.operations import Hidden
from quire.kernels.linear.recipes import Product
from quire.kernels.pointwise.norm import Norm
from quire.kernels.quantised import few, stream
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.recipes import (
    QUANTISED_ADD_LAYER_NORM,
    QUANTISED_ADD_SANDWICH,
    QUANTISED_GATE,
    QUANTISED_IN,
    QUANTISED_OUT,
    QUANTISED_OUT_OF_RANKS,
)
from quire.kernels.quantised.weight import WeightFormat, expand_reference
from quire.kernels.recipes import choose

FORMATS = {
    "float8_rows": WeightFormat("float8", 0, False, torch.float32),
    "float8_blocks": WeightFormat("float8", 128, False, torch.bfloat16),
    "int4": WeightFormat("int4", 128, False, torch.bfloat16),
    "int4_zeros": WeightFormat("int4", 128, True, torch.float16),
    "int4_small_groups": WeightFormat("int4", 64, True, torch.float16),
    "int4_long_groups": WeightFormat("int4", 384, True, torch.bfloat16),
    "int4_rows": WeightFormat("int4", 0, True, torch.float32),
}
# Of one tile, of more, and so many that weights are expanded; elsewhere torch has one way for all.
TOKENS = (1, 5, 16, 17, 64, 100, 250, 300) if torch.cuda.is_available() else (1, 17)
# (outputs, inputs): whole rounds of warps, ragged ones, less than one for each warp
SHAPES = ((256, 1152), (320, 1920), (128, 384))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # of the largest


@pytest.fixture(params=FORMATS)
def form(request):
    return FORMATS[request.param]


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def layer(request, form, device, dtype):
    torch.manual_seed(0)
    outputs, inputs = request.param
    return QuantisedLinear(weight_of(form, draw_numbers(form, outputs, inputs, device)), None)


def case_of(x, layer, *, fused: bool) -> Product:
    return Product(gpu_of(x.device), x.dtype, len(x), layer.matrix, fused=fused)


def ways_of(tokens, dtype):
    """Say whether norms and sums may be fused with products, and that they need not."""
    return (False, True) if tokens <= few.MOST_TOKENS and dtype == torch.bfloat16 else (False,)


def assert_near(result, expected):
    assert result.shape == expected.shape
    assert float((result.double() - expected).abs().max() / expected.abs().max()) < TOLERANCE[result.dtype]


def numbers_of(layer):
    return expand_reference(layer.weight, torch.float32).double()


def normed(x, norm):
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.double()


@pytest.mark.parametrize("tokens", TOKENS)
def test_into_attention(tokens, layer, device, dtype):
    outputs, inputs = layer.weight.shape
    x, norm = (
        torch.randn(tokens, inputs, device=device).to(dtype),
        torch.rand(inputs, device=device).to(dtype),
    )
    bias = torch.randn(outputs, device=device).to(dtype)
    layer = QuantisedLinear(layer.weight, bias)
    expected = normed(x, norm) @ numbers_of(layer).T + bias.double()
    for fused in ways_of(tokens, dtype):
        run = choose(QUANTISED_IN, case_of(x, layer, fused=fused)).run
        assert_near(run(Hidden(x), norm, 1e-5, layer), expected)


@pytest.mark.parametrize("tokens", TOKENS)
def test_gate_and_up(tokens, layer, device, dtype):
    inputs = layer.weight.shape[1]
    x, norm = (
        torch.randn(tokens, inputs, device=device).to(dtype),
        torch.rand(inputs, device=device).to(dtype),
    )
    gate, up = (normed(x, norm) @ numbers_of(layer).T).chunk(2, 1)
    for fused in ways_of(tokens, dtype):
        run = choose(QUANTISED_GATE, case_of(x, layer, fused=fused)).run
        assert_near(run(Hidden(x), norm, 1e-5, layer), F.silu(gate) * up)


@pytest.mark.parametrize("tokens", TOKENS)
def test_added_to_the_residual(tokens, layer, device, dtype):
    outputs, inputs = layer.weight.shape
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    before = torch.randn(tokens, outputs, device=device).to(dtype)
    norm = torch.rand(outputs, device=device).to(dtype)
    expected = before.double() + x.double() @ numbers_of(layer).T
    for fused in ways_of(tokens, dtype):
        run = choose(QUANTISED_OUT, case_of(x, layer, fused=fused)).run
        hidden = run(before.clone(), x, layer, norm, 1e-5)
        assert_near(hidden.residual, expected)
        if hidden.normed is not None:
            assert_near(hidden.normed, normed(expected, norm))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_added_before_a_layer_norm(tokens, biased, layer, device, dtype):
    outputs, inputs = layer.weight.shape
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    before = torch.randn(tokens, outputs, device=device).to(dtype)
    norm = torch.rand(outputs, device=device).to(dtype)
    if biased:
        layer = QuantisedLinear(layer.weight, torch.randn(outputs, device=device).to(dtype))
    expected = before.double() + x.double() @ numbers_of(layer).T + (layer.bias.double() if biased else 0)
    for fused in ways_of(tokens, dtype):
        run = choose(QUANTISED_ADD_LAYER_NORM, case_of(x, layer, fused=fused)).run
        residual = before.clone()
        assert_near(
            run(residual, x, layer, norm, None, 1e-5), F.layer_norm(expected, (outputs,), norm.double())
        )
        assert_near(residual, expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_normed_and_added_before_a_norm(tokens, biased, layer, device, dtype):
    outputs, inputs = layer.weight.shape
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    before = torch.randn(tokens, outputs, device=device).to(dtype)
    inner, outer = (torch.rand(outputs, device=device).to(dtype) for _ in range(2))
    if biased:
        layer = QuantisedLinear(layer.weight, torch.randn(outputs, device=device).to(dtype))
    added = x.double() @ numbers_of(layer).T + (layer.bias.double() if biased else 0)
    expected = before.double() + normed(added, inner)
    for fused in ways_of(tokens, dtype):
        run = choose(QUANTISED_ADD_SANDWICH, case_of(x, layer, fused=fused)).run
        residual = before.clone()
        after = run(residual, x, layer, Norm(inner, 1e-5), Norm(outer, 1e-5))
        assert_near(residual, expected)
        assert_near(after, normed(expected, outer))


@pytest.mark.parametrize("tokens", TOKENS)
def test_products_outside_a_planned_layer(tokens, layer, device, dtype):
    outputs, inputs = layer.weight.shape
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    before = torch.randn(tokens, outputs, device=device).to(dtype)
    norm = torch.rand(outputs, device=device).to(dtype)
    product = x.double() @ numbers_of(layer).T
    gate, up = product.chunk(2, 1)
    assert_near(alone.linear(x, layer), product)
    assert_near(alone.linear(x, QuantisedLinear(layer.weight, None, OneOfRanks(0, 2))), product)
    assert_near(alone.gated_linear(x, layer, "silu"), F.silu(gate) * up)
    after = alone.add_linear(before.clone(), x, layer, norm, None, 1e-5)
    assert_near(after, F.layer_norm(before.double() + product, (outputs,), norm.double()))
    after = alone.add_normed_linear(before.clone(), x, layer, None, Norm(norm, 1e-5))
    assert_near(after, normed(before.double() + product, norm))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_part_of_a_sum_over_ranks(tokens, biased, layer, device, dtype):
    """By a rank that has all inputs, and so the whole sum."""
    outputs, inputs = layer.weight.shape
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    before = torch.randn(tokens, outputs, device=device).to(dtype)
    norm = torch.rand(outputs, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if biased else None
    layer = QuantisedLinear(layer.weight, bias, OneOfRanks(0, 2))
    expected = before.double() + x.double() @ numbers_of(layer).T + (bias.double() if biased else 0)
    for fused in ways_of(tokens, dtype):
        run = choose(QUANTISED_OUT_OF_RANKS, case_of(x, layer, fused=fused)).run
        hidden = run(before.clone(), x, layer, norm, 1e-5)
        assert_near(hidden.residual, expected)
        assert_near(hidden.normed, normed(expected, norm))


def test_tokens_are_the_same_whoever_is_beside_them(layer, device, dtype):
    """A token's numbers do not follow from what other rows of its tile hold."""
    inputs = layer.weight.shape[1]
    x = torch.randn(40, inputs, device=device).to(dtype)
    other = x.clone()
    other[1:] = torch.randn(39, inputs, device=device).to(dtype)
    norm = torch.rand(inputs, device=device).to(dtype)
    run = choose(QUANTISED_IN, case_of(x, layer, fused=False)).run
    one, two = run(Hidden(x), norm, 1e-5, layer), run(Hidden(other), norm, 1e-5, layer)
    if device.type == "cuda":
        assert torch.equal(one[0], two[0])
    else:  # a library's sums may go another way
        torch.testing.assert_close(one[0], two[0])


def test_what_kernels_do_not_take_is_refused(device):
    form = FORMATS["int4"]
    weight = weight_of(form, draw_numbers(form, 24, 128, device))
    x, out = torch.zeros(1, 128, device=device), torch.zeros(1, 24, device=device)
    with pytest.raises(ValueError, match="a multiple of 16 outputs and contiguous tokens; got 24 outputs"):
        few.quantised_of_few(out, x, weight, None, None, 0.0, gated=False, added=False)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 33, 64, 65, 128, 256])
def test_programs_fit_a_multiprocessor(form, tokens, gated):
    for outputs, inputs in ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 128), (64, 384)):
        for divided in (False, True):
            tiles = stream.tiling(form, tokens, outputs, inputs, gated=gated, divided=divided)
            if form.group == 64:
                assert tiles is None
                continue
            of_line = 128 if form.codes == "float8" else 64
            stages = tiles.stages * (tiles.tokens * 256 + tiles.rows * of_line)
            assert tiles.stages >= 2 and stages <= 220 * 1024
            assert 1 <= tiles.splits <= inputs // 128
