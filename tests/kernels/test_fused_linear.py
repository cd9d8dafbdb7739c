"""Fused linear layers of one token and of a few, against the unfused ones in fp64."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from gpus import GPUS
from products import (
    add_linear,
    add_linear_reference,
    gpu_here,
    norm_linear,
    norm_linear_reference,
    norm_silu_linear,
    norm_silu_linear_reference,
)

from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.gpu import NO_GPU
from quire.kernels.linear import gemv, hopper_gemv
from quire.kernels.linear.alone import (
    activated_linear,
    activated_linear_reference,
    gated_linear,
    gated_linear_reference,
)
from quire.kernels.linear.gemv import Tiles, linear_of_one, tiles_of_one
from quire.kernels.linear.hopper_gemv import linear_of_one_held
from quire.kernels.linear.linear import Linear, Matrix
from quire.kernels.linear.operations import wide_linear
from quire.kernels.linear.skinny import linear_of_few
from quire.kernels.plan import most_fused_tokens
from quire.kernels.pointwise.activation import ACTIVATIONS, UNGATED
from quire.kernels.shapes import LayerShape

# (columns, outputs): one chunk, a ragged one, several, several and ragged; odd outputs. Then such as Hopper
# has waiting in shared memory: whole lines, half ones, an odd number of each.
SHAPES = [(64, 8), (100, 7), (3072, 5), (2500, 3), (1024, 24), (1152, 6), (1280, 4)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of sums of order one


def draw(columns: int, outputs: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x [1, columns], norm [columns], weight [outputs, columns], bias [outputs]."""
    torch.manual_seed(0)
    shapes = [(1, columns), (columns,), (outputs, columns), (outputs,)]
    scales = [3.0, 1.0, columns**-0.5, 1.0]
    return tuple(
        (torch.randn(shape) * scale).to(device, dtype) for shape, scale in zip(shapes, scales, strict=True)
    )


def exact_norm(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], norm.double(), 1e-6)


def assert_near(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("columns", "outputs"), SHAPES)
@pytest.mark.parametrize("function", [norm_linear, norm_linear_reference])
@pytest.mark.parametrize("biased", [False, True])
def test_norm_linear(function, columns, outputs, biased, dtype, device):
    x, norm, weight, bias = draw(columns, outputs, dtype, device)
    result = function(x, norm, 1e-6, weight, bias if biased else None)
    exact = F.linear(exact_norm(x, norm), weight.double(), bias.double() if biased else None)
    assert_near(result, exact, dtype)


@pytest.mark.parametrize(("columns", "outputs"), SHAPES)
@pytest.mark.parametrize("function", [norm_silu_linear, norm_silu_linear_reference])
@pytest.mark.parametrize("biased", [False, True])
def test_norm_silu_linear(function, columns, outputs, biased, dtype, device):
    x, norm, weight, bias = draw(columns, 2 * outputs, dtype, device)
    result = function(x, norm, 1e-6, weight, bias if biased else None)
    both = F.linear(exact_norm(x, norm), weight.double(), bias.double() if biased else None)
    gate, up = both.chunk(2, dim=1)
    assert_near(result, F.silu(gate) * up, dtype)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", UNGATED)
@pytest.mark.parametrize("function", [activated_linear, activated_linear_reference])
def test_activated_linear(function, name, biased, tokens, dtype, device):
    x, _, weight, bias = draw(100, 7, dtype, device)
    x = x.repeat(tokens, 1)
    result = function(x, Linear(weight, bias if biased else None), name)
    both = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    exact = UNGATED[name](both)
    scale = exact.abs().max().clamp(min=1.0)
    assert_near(result / scale.to(dtype), exact / scale.to(dtype).double(), dtype)


# The last ones are such as Hopper's kernels take.
@pytest.mark.parametrize(
    ("tokens", "columns", "outputs"), [(1, 100, 14), (2, 100, 14), (8, 1152, 512), (200, 512, 256)]
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("function", [gated_linear, gated_linear_reference])
def test_gated_linear(function, name, biased, tokens, columns, outputs, dtype, device):
    _, _, weight, bias = draw(columns, outputs, dtype, device)
    x = torch.randn(tokens, columns).to(device, dtype)
    result = function(x, Linear(weight, bias if biased else None), name)
    gate, up = F.linear(x.double(), weight.double(), bias.double() if biased else None).chunk(2, dim=1)
    exact = ACTIVATIONS[name](gate) * up
    scale = exact.abs().max().clamp(min=1.0)
    assert_near(result / scale.to(dtype), exact / scale.to(dtype).double(), dtype)


@pytest.mark.parametrize(("columns", "outputs"), SHAPES)
@pytest.mark.parametrize("function", [add_linear, add_linear_reference])
@pytest.mark.parametrize("biased", [False, True])
def test_add_linear_works_in_place(function, columns, outputs, biased, dtype, device):
    x, _, weight, bias = draw(columns, outputs, dtype, device)
    residual = torch.randn(1, outputs).to(device, dtype)
    exact = residual.double() + F.linear(x.double(), weight.double(), bias.double() if biased else None)
    function(residual, x, weight, bias if biased else None)
    assert_near(residual, exact, dtype)


ALL_TILES = {
    tiles_of_one(outputs, columns, gated=gated)
    for outputs in (1024, 2048, 3072, 4096, 5120)
    for columns in (640, 896, 1152, 1536, 2048, 2560, 3072, 4096, 8192, 17408)
    for gated in (False, True)
}


@pytest.mark.parametrize("tiles", sorted(ALL_TILES, key=str), ids=str)
def test_one_token_is_multiplied_the_same_by_any_tiles(tiles: Tiles, dtype, device):
    """Of few outputs and of columns that fill no chunk, so that an interpreter comes to them."""
    columns, outputs = 2500, 9
    x, norm, weight, _ = draw(columns, 2 * outputs, dtype, device)
    with mock.patch.object(gemv, "tiles_of_one", lambda *_, gated: tiles):
        gated = torch.zeros(1, outputs, dtype=dtype, device=device)
        linear_of_one(gated, x, weight, None, norm, 1e-6, gated=True, added=False)
        added = torch.ones(1, 2 * outputs, dtype=dtype, device=device)
        linear_of_one(added, x, weight, None, None, 0.0, gated=False, added=True)
    gate, up = F.linear(exact_norm(x, norm), weight.double()).chunk(2, dim=1)
    assert_near(gated, F.silu(gate) * up, dtype)
    assert_near(added, 1 + F.linear(x.double(), weight.double()), dtype)


# Whole lines of what waits in shared memory, half ones, an odd number of each; narrow and wide layers.
HELD_COLUMNS = (512, 1024, 1152, 1280, 1536, 2560, 3584, 4096, 5120, 8192)


@pytest.mark.parametrize("columns", HELD_COLUMNS)
@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize("biased", [False, True])
def test_one_token_by_weights_that_wait_where_a_gpu_has_room_for_them(columns, kind, biased, device):
    """By `linear.hopper_gemv` on Hopper, else by `linear.gemv`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    gated, added = kind == "gated", kind == "added"
    outputs = 24
    x, norm, weight, bias = draw(columns, 2 * outputs if gated else outputs, dtype, device)
    norm, bias = None if added else norm, bias if biased else None
    held = hopper_gemv.supports(gpu_here(device), dtype, Linear(weight, bias).matrix, gated=gated)
    residual = torch.randn(1, outputs).to(device, dtype)
    out = residual.clone()
    by = linear_of_one_held if held else linear_of_one
    by(out, x, weight, bias, norm, 1e-6, gated=gated, added=added)
    inputs = x.double() if norm is None else exact_norm(x, norm)
    exact = F.linear(inputs, weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = exact.chunk(2, dim=1)
        exact = F.silu(gate) * up
    assert_near(out, residual.double() + exact if added else exact, dtype)


# Of several tokens the references everywhere, the kernel where there is a GPU: it is of Triton's lower level,
# which no interpreter runs. (tokens, columns, outputs): one chunk a warp, a few, more than are asked for
# ahead.
FEW_SHAPES = [
    (1, 1024, 32),
    (2, 512, 16),
    (7, 1024, 48),
    (8, 2048, 32),
    (9, 3072, 64),
    (16, 6144, 16),
    (3, 2560, 80),
]
FEW_TYPES = [torch.bfloat16] if torch.cuda.is_available() else [torch.float32]


def draw_few(tokens: int, columns: int, outputs: int, dtype, device) -> tuple[torch.Tensor, ...]:
    _, norm, weight, bias = draw(columns, outputs, dtype, device)
    return (torch.randn(tokens, columns) * 3).to(device, dtype), norm, weight, bias


def of_few(kernel, reference):
    return [reference, kernel] if torch.cuda.is_available() else [reference]


@pytest.mark.parametrize(("tokens", "columns", "outputs"), FEW_SHAPES)
@pytest.mark.parametrize("function", of_few(norm_linear, norm_linear_reference))
@pytest.mark.parametrize("few_dtype", FEW_TYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_norm_linear_of_few(function, tokens, columns, outputs, biased, few_dtype, device):
    x, norm, weight, bias = draw_few(tokens, columns, outputs, few_dtype, device)
    result = function(x, norm, 1e-6, weight, bias if biased else None)
    exact = F.linear(exact_norm(x, norm), weight.double(), bias.double() if biased else None)
    assert_near(result, exact, few_dtype)


@pytest.mark.parametrize(("tokens", "columns", "outputs"), FEW_SHAPES)
@pytest.mark.parametrize("function", of_few(norm_silu_linear, norm_silu_linear_reference))
@pytest.mark.parametrize("few_dtype", FEW_TYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_norm_silu_linear_of_few(function, tokens, columns, outputs, biased, few_dtype, device):
    x, norm, weight, bias = draw_few(tokens, columns, 2 * outputs, few_dtype, device)
    result = function(x, norm, 1e-6, weight, bias if biased else None)
    both = F.linear(exact_norm(x, norm), weight.double(), bias.double() if biased else None)
    gate, up = both.chunk(2, dim=1)
    assert_near(result, F.silu(gate) * up, few_dtype)


@pytest.mark.parametrize(("tokens", "columns", "outputs"), FEW_SHAPES)
@pytest.mark.parametrize("function", of_few(add_linear, add_linear_reference))
@pytest.mark.parametrize("few_dtype", FEW_TYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_add_linear_of_few_works_in_place(function, tokens, columns, outputs, biased, few_dtype, device):
    x, _, weight, bias = draw_few(tokens, columns, outputs, few_dtype, device)
    residual = torch.randn(tokens, outputs).to(device, few_dtype)
    exact = residual.double() + F.linear(x.double(), weight.double(), bias.double() if biased else None)
    function(residual, x, weight, bias if biased else None)
    assert_near(residual, exact, few_dtype)


@pytest.mark.parametrize(("tokens", "columns", "outputs"), [(17, 512, 16), (2, 500, 16), (2, 512, 8)])
def test_what_is_not_of_few_is_refused(tokens, columns, outputs, device):
    x, _, weight, _ = draw(columns, outputs, torch.bfloat16, device)
    with pytest.raises(
        ValueError, match=f"up to 16 tokens .* got {tokens} tokens, {columns} columns, {outputs} "
    ):
        residual = torch.zeros(tokens, outputs, device=device)
        linear_of_few(residual, x.repeat(tokens, 1), weight, None, None, 0.0, gated=False, added=True)


@pytest.mark.parametrize(
    ("tokens", "columns", "outputs"),
    [
        (0, 512, 64),
        (1, 100, 7),
        (1, 3072, 96),
        (2, 1024, 96),
        (3, 100, 7),
        (8, 1024, 16512),
        (20, 1024, 16512),
        (40, 1024, 16512),
    ],
)
def test_wide_linear(tokens, columns, outputs, dtype, device):
    x, _, weight, _ = draw_few(tokens, columns, outputs, dtype, device)
    assert_near(wide_linear(x, weight), F.linear(x.double(), weight.double()), dtype)


def layer_of(hidden: int, inner: tuple[int, int], qkv: int, dtype: torch.dtype, **changes) -> LayerShape:
    attended, mlp = inner
    shape = LayerShape(
        dtype, 8, CacheSpec(8, 64), Matrix(qkv, hidden), Matrix(hidden, attended), Matrix(2 * mlp, hidden),
        Matrix(hidden, mlp), gated=True,
    )  # fmt: skip
    return replace(shape, **changes)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_widths_decide_what_is_fused(gpu):
    def most(*widths, **changes) -> int:
        return most_fused_tokens(gpu, layer_of(*widths, **changes))

    streams = gpu.has_warpgroup_products
    assert most(1024, (2048, 3072), 4096, torch.bfloat16) == (8 if streams else 16)
    assert most(2048, (2048, 8192), 3072, torch.bfloat16) == (1 if streams else 16)
    assert most(4096, (4096, 14336), 6144, torch.bfloat16) == 1  # cuBLAS is quicker
    assert most(1024, (2048, 3000), 4096, torch.bfloat16) == 1
    assert most(1024, (512, 3072), (128 + 2) * 4, torch.bfloat16) == 1  # heads of 4, one of KV
    assert most(1024, (2048, 3072), 4096, torch.float16) == 1
    assert most(1024, (2048, 3072), 4096, torch.bfloat16, gated=False) == 0


def test_nothing_is_fused_without_a_gpu():
    assert most_fused_tokens(NO_GPU, layer_of(1024, (2048, 3072), 4096, torch.bfloat16)) == 0


@pytest.mark.parametrize(
    ("outputs", "columns", "tiles"),
    [
        (2048, 8192, Tiles(rows=8, chunk=2048, held=8)),
        (1536, 8960, Tiles(rows=4, chunk=2048, held=8)),
        (1152, 6912, Tiles(rows=4, chunk=2048, held=8)),
        (2048, 2048, Tiles(rows=4, chunk=2048, held=8)),
        (3072, 8192, Tiles(rows=2, chunk=4096, held=16)),
        (3072, 12288, Tiles(rows=4, chunk=2048, held=8)),
        (3584, 18944, Tiles(rows=4, chunk=1024, held=8)),  # not in whole pieces
        (3584, 3584, Tiles(rows=4, chunk=1024, held=8)),
        (4608, 3584, Tiles(rows=4, chunk=512, held=16)),
        (4096, 14336, Tiles(rows=4, chunk=1024, held=8)),
        (5120, 17408, Tiles(rows=8, chunk=2048, held=8)),
    ],
)
def test_few_programs_and_long_rows_ask_for_much_at_once(outputs: int, columns: int, tiles: Tiles) -> None:
    assert tiles_of_one(outputs, columns, gated=False) == tiles


@pytest.mark.parametrize(
    ("outputs", "columns", "tiles"),
    [
        (6912, 1152, Tiles(rows=1, chunk=2048, held=32)),
        (8960, 1536, Tiles(rows=1, chunk=512, held=16)),
        (8192, 2048, Tiles(rows=1, chunk=1024, held=8)),
        (1024, 2048, Tiles(rows=2, chunk=512, held=16)),  # a rank's
        (8192, 3072, Tiles(rows=1, chunk=1024, held=16)),
        (14336, 4096, Tiles(rows=1, chunk=512, held=16)),
    ],
)
def test_gates_are_asked_for_in_pieces_that_are_there(outputs: int, columns: int, tiles: Tiles) -> None:
    assert tiles_of_one(outputs, columns, gated=True) == tiles


def test_one_token_asks_for_few_columns_that_are_not_there():
    assert tiles_of_one(6144, 4096, gated=False) == Tiles(rows=4, chunk=1024, held=8)
    assert tiles_of_one(6144, 2560, gated=False) == Tiles(rows=4, chunk=512, held=16)
    assert tiles_of_one(1024, 3072, gated=False) == Tiles(rows=4, chunk=2048, held=8)  # few programs
    assert tiles_of_one(9728, 2560, gated=True) == Tiles(rows=1, chunk=512, held=16)
    assert tiles_of_one(3072, 48, gated=True) == Tiles(rows=2, chunk=64, held=16)
    for columns in range(128, 20000, 128):
        asked = tiles_of_one(8192, columns, gated=False).chunk
        assert -(-columns // asked) * asked <= max(1.35 * columns, columns + 384)


def test_a_transposed_weight_is_refused(device):
    x, _, weight, _ = draw(64, 64, torch.float32, device)
    with pytest.raises(ValueError, match="contiguous weight"):
        residual = torch.zeros(1, 64, device=device)
        linear_of_one(residual, x, weight.T, None, None, 0.0, gated=False, added=True)
