"""A model's linear layers against fp64: on a GPU by the kernels for so many tokens, elsewhere by torch."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from products import (
    add_linear_norm,
    add_linear_norm_reference,
    linear,
    linear_parts,
    linear_reference,
    product,
    silu_linear,
    silu_linear_reference,
)

from quire.kernels.linear import hopper_matmul
from quire.kernels.linear.hopper_matmul import is_quick, launch_each, takes
from quire.kernels.linear.hopper_stream import (
    CHUNK,
    ITEMSIZE,
    WIDE,
    Tiling,
    suits_hopper_linear,
    tiling,
    warps_of,
)
from quire.kernels.linear.linear import Linear
from quire.kernels.pointwise.activation import silu_mul
from quire.kernels.pointwise.norm import rms_norm

SHARED_MEMORY_LIMIT = 227 * 1024
TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # of sums of order one, over 8192
# (tokens, columns, outputs): one tile, several and ragged ones, of two sizes; widths that no tile divides
SHAPES = [
    (1, 256, 128),
    (17, 1024, 256),
    (64, 384, 128),
    (65, 1024, 256),
    (100, 640, 128),
    (129, 1024, 256),
    (256, 512, 128),
    (257, 512, 128),
    (40, 1000, 100),
]
WIDE_SHAPES = [
    (1, 4096, 4096),
    (16, 8192, 4096),
    (17, 4096, 6144),
    (32, 4096, 8192),
    (33, 4096, 4096),
    (20, 4096, 4160),
    (64, 8192, 4096),
    (65, 4096, 8192),
    (100, 4096, 16384),
    (128, 4096, 4096),
    (129, 4096, 4096),
    (250, 4096, 16384),
]
# So many tokens that persistent programs take them on an H100: one tile each, two, and more with ragged ones
# and a narrow band of tokens at the end. Elsewhere they would be no others than those above
MANY_SHAPES = [(4224, 320, 1024), (8448, 512, 1024), (8400, 1024, 512), (16896, 512, 512), (20011, 384, 1536)]
ALL_SHAPES = SHAPES + WIDE_SHAPES + (MANY_SHAPES if torch.cuda.is_available() else [])


@pytest.fixture(params=ALL_SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def shape(request, device):
    tokens, columns, outputs = request.param
    if device.type == "cpu":  # no tiles of ours there, and each token takes its time in the interpreter
        wide = request.param in WIDE_SHAPES
        return (
            (min(tokens, 5), columns // 64, outputs // 128 * 2)
            if wide
            else (min(tokens, 5), columns, outputs)
        )
    return request.param


def draw(shape, dtype, device, *, biased):
    """x [tokens, columns] and a layer [outputs, columns]."""
    tokens, columns, outputs = shape
    generator = torch.Generator(device).manual_seed(0)
    x, weight, bias = (
        torch.randn(size, generator=generator, device=device)
        for size in ((tokens, columns), (outputs, columns), (outputs,))
    )
    return x.to(dtype), Linear((weight * columns**-0.5).to(dtype), bias.to(dtype) if biased else None)


def exact(x, layer):
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(x.double(), layer.weight.double(), bias)


def assert_near(result, expected, dtype):
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("function", [linear, linear_reference])
def test_linear(function, shape, biased, dtype, device):
    x, layer = draw(shape, dtype, device, biased=biased)
    assert_near(function(x, layer), exact(x, layer), dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("function", [silu_linear, silu_linear_reference])
def test_silu_linear(function, shape, biased, dtype, device):
    x, layer = draw(shape, dtype, device, biased=biased)
    gate, up = exact(x, layer).chunk(2, dim=1)
    assert_near(function(x, layer), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("function", [add_linear_norm, add_linear_norm_reference])
def test_add_linear_norm(function, shape, biased, dtype, device):
    x, layer = draw(shape, dtype, device, biased=biased)
    expected = exact(x, layer)
    residual = torch.randn(expected.shape, device=device).to(dtype)
    expected += residual.double()
    norm = torch.rand(expected.shape[1], device=device).to(dtype)
    normed, added = function(residual, x, layer, norm, 1e-6)
    assert added is residual
    assert_near(residual, expected, dtype)
    assert_near(normed, F.rms_norm(expected, expected.shape[1:], norm.double(), 1e-6), dtype)


def test_many_tokens_results_are_as_if_unfused(dtype, device):
    """To the last bit, and whatever other tokens there are; where they are ours at all."""
    x, layer = draw((8448, 512, 1024) if device.type == "cuda" else (24, 64, 32), dtype, device, biased=False)
    case = product(x, layer)
    ours = hopper_matmul.supports(case.gpu, dtype, case.weight) and case.many(spared=0)
    tolerance = 0.0 if ours else TOLERANCE[dtype]
    added = linear(x, layer)
    residual = torch.randn(added.shape, device=device).to(dtype)
    expected = residual + added
    norm = torch.ones(added.shape[1], dtype=dtype, device=device)
    normed, residual = add_linear_norm(residual, x, layer, norm, 1e-6)
    near = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    near(residual, expected)
    near(normed, rms_norm(expected, norm, 1e-6))
    near(silu_linear(x, layer), silu_mul(added))
    half = len(x) // 2
    for function in (linear, silu_linear):
        near(function(x[half:].contiguous(), layer), function(x, layer)[half:])


@given(
    st.integers(1, 20000) | st.integers(1, 160).map(lambda n: n * 128),
    st.integers(1, 128).map(lambda n: n * 256),
    st.integers(5, 300).map(lambda n: n * 64),
    st.sampled_from([78, 114, 132]),
    st.integers(0, 2),
)
def test_many_tokens_are_ours_where_they_keep_the_multiprocessors_busy(
    count, outputs, columns, multiprocessors, spared
):
    quick = is_quick(count, outputs, columns, multiprocessors, spared=spared)
    assert quick or not is_quick(count, outputs, columns, multiprocessors, spared=0)
    rounds = math.ceil(math.ceil(count / 128) * (outputs // 256) / multiprocessors)
    idle = 1 - count * outputs / (rounds * multiprocessors * 128 * 256)
    gain = spared * 175 / columns
    if abs(idle - gain / (1 + gain)) > 1e-9:
        assert quick == (idle < gain / (1 + gain))


@pytest.mark.parametrize(
    ("count", "outputs", "columns", "spared", "quick"),
    [
        (8448, 28672, 4096, 2, True),
        (4224, 28672, 4096, 2, True),
        (3168, 28672, 4096, 2, True),
        (3168, 28672, 4096, 1, False),
        (1584, 28672, 4096, 2, False),
        (528, 28672, 4096, 2, False),
        (8448, 6144, 4096, 0, True),
        (8447, 6144, 4096, 0, False),
        (8448, 4096, 14336, 1, True),
        (8000, 4096, 14336, 1, False),
        (2112, 6144, 1024, 2, True),
        (2112, 6144, 1024, 1, False),
    ],
)
def test_products_of_the_measured_models_that_are_ours(count, outputs, columns, spared, quick):
    """Of Llama-3.1-8B and Qwen3-0.6B on an H100."""
    assert is_quick(count, outputs, columns, 132, spared=spared) == quick


@given(st.integers(1, 1024), st.integers(1, 1024))
def test_weights_are_taken_that_tiles_divide(outputs, columns):
    assert takes(256 * outputs, 64 * columns) == (columns > 4)
    assert not takes(256 * outputs + outputs % 255 + 1, 64 * columns)
    assert not takes(256 * outputs, 64 * columns + columns % 63 + 1)


def test_few_columns_and_strided_residuals_are_not_ours(device):
    """Nor others that tiles would divide; they have right results nevertheless."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    count, outputs = (8448, 512) if device.type == "cuda" else (24, 32)
    for columns, stride in ((256, 1), (512, 2)):
        x, layer = draw((count, columns, outputs), dtype, device, biased=False)
        wide = torch.randn(count, stride * outputs, device=device).to(dtype)
        before = wide.clone()
        norm = torch.ones(outputs, dtype=dtype, device=device)
        _, added = add_linear_norm(wide[:, :outputs], x, layer, norm, 1e-6)
        assert_near(added, before[:, :outputs].double() + exact(x, layer), dtype)
        assert torch.equal(wide[:, outputs:], before[:, outputs:])


def test_a_tile_of_256_tokens_takes_nearly_as_many():
    """The gate and up of Llama-3.1-8B."""
    for count in (129, 240):
        assert tiling(count, 28672, 4096, gated=True, divided=False) is None
    for count in (241, 256):
        tiles = tiling(count, 28672, 4096, gated=True, divided=False)
        assert tiles == Tiling(tokens=256, rows=128, chunk=64, stages=4, splits=1)
        assert warps_of(tiles) == 8


def test_many_tokens_leave_few_multiprocessors_idle():
    """Weights of Qwen2.5-1.5B, Qwen3-4B, Starcoder2 3B and Llama-3.2-1B, whose programs are 128 to 192."""
    for outputs, columns in ((17920, 1536), (19456, 2560)):
        assert tiling(256, outputs, columns, gated=True, divided=False) is None
        # Two programs on each.
        tiles = tiling(128, outputs, columns, gated=True, divided=False)
        assert tiles == Tiling(tokens=128, rows=128, chunk=64, stages=3, splits=1)
    tiles = tiling(256, 16384, 2048, gated=True, divided=False)
    assert tiles == Tiling(tokens=256, rows=128, chunk=64, stages=4, splits=1)
    assert tiling(256, 6144, 2560, gated=False, divided=False) is None
    assert tiling(256, 3072, 3072, gated=False, divided=True) is None
    # Larger tiles, which are one for each at most.
    assert tiling(192, 3584, 3072, gated=False, divided=False) == Tiling(64, 128, 128, 4, 1)
    assert tiling(128, 3584, 3072, gated=False, divided=False) == Tiling(64, 64, 128, 6, 1)


def test_few_tokens_and_small_models_weights_are_cut_as_was_quickest():
    """Those of Gemma 3 1B, Qwen3-0.6B and Llama-3.2-1B: qkv, output, down, and gate and up."""
    assert tiling(8, 1536, 1152, gated=False, divided=False) == Tiling(16, 64, 128, 9, 1)
    assert tiling(8, 1152, 6912, gated=False, divided=True) == Tiling(16, 64, 128, 9, 4)
    assert tiling(64, 1152, 6912, gated=False, divided=True) == Tiling(64, 32, 128, 8, 3)
    assert tiling(8, 13824, 1152, gated=True, divided=False) == Tiling(16, 128, 128, 5, 1)
    assert tiling(32, 13824, 1152, gated=True, divided=False) == Tiling(32, 128, 128, 4, 1)
    assert tiling(8, 1024, 3072, gated=False, divided=True) == Tiling(16, 64, 128, 6, 4)
    assert tiling(8, 6144, 1024, gated=True, divided=False) == Tiling(16, 128, 128, 5, 1)
    assert tiling(32, 6144, 1024, gated=True, divided=False) == Tiling(64, 64, 128, 6, 1)
    assert tiling(32, 2048, 2048, gated=False, divided=True) == Tiling(32, 64, 128, 8, 2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("divided", [False, True])
def test_every_program_has_chunks_for_its_stages_and_room_for_them(gated, divided):
    for outputs, columns in itertools.product(
        (256, 1024, 1152, 2560, 6144, 13824, 28672), (256, 1024, 1152, 4096, 14336)
    ):
        for count in (1, 8, 16, 17, 32, 33, 64, 65, 128, 200, 256):
            tiles = tiling(count, outputs, columns, gated=gated, divided=divided and not gated)
            if tiles is not None:
                held = tiles.stages * (tiles.tokens + tiles.rows) * tiles.chunk * 2
                assert held <= 192 * 1024
                assert outputs % tiles.rows == 0 and columns % tiles.chunk == 0
                assert 1 <= tiles.splits <= min(4 if divided else 1, columns // tiles.chunk)
                assert tiles.stages >= 2
                assert tiles.stages == 2 or (tiles.stages - 1) * tiles.splits < columns // tiles.chunk


def test_few_tokens_and_a_ranks_weights_are_cut_as_was_quickest():
    """Those that a rank of two has of Llama-3.1-8B and Qwen3-14B: qkv, output, down, and gate and up."""
    assert tiling(8, 3072, 4096, gated=False, divided=False) == Tiling(16, 64, 128, 9, 1)
    assert tiling(64, 3072, 4096, gated=False, divided=False) == Tiling(64, 32, 128, 8, 1)
    assert tiling(8, 4096, 2048, gated=False, divided=True) == Tiling(16, 64, 128, 4, 4)
    assert tiling(64, 4096, 2048, gated=False, divided=True) == Tiling(64, 64, 128, 6, 2)
    assert tiling(8, 4096, 7168, gated=False, divided=True) == Tiling(16, 64, 128, 9, 2)
    for count, stages in ((16, 4), (64, 3)):
        tiles = tiling(count, 5120, 8704, gated=False, divided=True)
        assert tiles == Tiling(count, 64, 128, stages, 3)
    assert tiling(8, 17408, 5120, gated=True, divided=False) == Tiling(16, 128, 128, 3, 1)
    assert tiling(32, 17408, 5120, gated=True, divided=False) == Tiling(32, 128, 128, 4, 1)
    assert tiling(64, 5120, 2560, gated=False, divided=False) == Tiling(64, 32, 128, 4, 1)
    assert tiling(64, 5120, 2560, gated=False, divided=True) == Tiling(64, 64, 128, 3, 3)


def test_a_rehearsal_asks_for_each_kernel_of_many_tokens(dtype, device, monkeypatch):
    launch_each(device, dtype)  # where there are none, too
    launched = []

    def launch(out, x, weight, *, gated, added):
        assert takes(*weight.shape)
        assert out.shape == (len(x), len(weight) // 2 if gated else len(weight))
        launched.append((gated, added))

    monkeypatch.setattr(hopper_matmul, "suits_hopper_linear", lambda x, weight: True)
    monkeypatch.setattr(hopper_matmul, "_launch", launch)
    launch_each(device, dtype)
    assert sorted(launched) == [(False, False), (False, True), (True, False)]


def test_a_tokens_results_are_its_own(dtype, device):
    """To the last bit within a size of tile, which is more than cuBLAS promises."""
    x, layer = draw((64, 1024, 256), dtype, device, biased=False)
    ours = suits_hopper_linear(x, layer.weight)
    for function in (linear, silu_linear, linear_parts):
        together, alone = function(x, layer), function(x[:1].contiguous(), layer)
        tolerance = 0.0 if ours else TOLERANCE[dtype]
        torch.testing.assert_close(together[..., :1, :], alone, rtol=tolerance, atol=tolerance)


CHUNKS_OF_64 = st.integers(1, 300).map(lambda n: n * 64)


@given(
    st.integers(1, 512),
    st.integers(1, 64).map(lambda n: n * 32) | st.integers(1, 2048) | CHUNKS_OF_64,
    CHUNKS_OF_64,
    st.sampled_from([(True, False), (False, True), (False, False)]),
)
@example(8, 16896, 512, (False, True))  # whose tiles alone are more programs than fit at once
@example(129, 2176, 128, (True, False))
@example(256, 3072, 3072, (False, True))
def test_tiles_cover_a_product_and_fit_shared_memory(count, outputs, columns, kind):
    gated, divided = kind
    tiles = tiling(count, outputs, columns, gated=gated, divided=divided)
    wide = outputs * columns >= WIDE
    fits = outputs % (64 if wide else 32) == 0 and columns % CHUNK == 0
    if count <= (64 if wide else 128):
        assert (tiles is not None) == fits
    elif count > (128 if wide and not (gated and count > 240) else 256) or not fits:
        assert tiles is None
    if tiles is None:
        return
    assert outputs % tiles.rows == 0
    assert columns % tiles.chunk == 0
    assert 1 <= tiles.splits <= (4 if divided else 1)
    assert tiles.stages > 1
    if tiles.tokens < 64:  # the weights are what the tensor cores take at least 64 rows of
        assert tiles.rows == 128 or (tiles.rows == 64 and not gated)
    used = tiles.stages * (tiles.tokens + tiles.rows) * tiles.chunk * ITEMSIZE
    # Before it is in lines, and a gate applied to its up.
    written = tiles.tokens * tiles.rows * (4 if divided else ITEMSIZE) // (2 if gated else 1)
    assert used + written < SHARED_MEMORY_LIMIT
