"""How an fp12 cache rounds: every bf16, and the kernels as torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.formats import fp12
from quire.kernels.formats.kv_scales import is_broken

ALL = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
FINITE = ALL[ALL.isfinite()]


@pytest.mark.parametrize("power", [-30, -14, -3, 0, 15])
def test_every_bf16_down_to_two_to_the_minus_14_of_the_largest_is_held_and_smaller_ones_in_equal_steps(
    power: int,
) -> None:
    largest = 1.5 * 2.0**power
    smaller = FINITE[FINITE.abs() <= largest]
    others = torch.zeros(-(-len(smaller) // 31), 31)
    others.view(-1)[: len(smaller)] = smaller
    x = torch.cat((torch.full((len(others), 1), largest), others), 1)
    planes, scales = fp12.quantize(x)
    scale = 2.0 ** max(power, -14)
    assert planes.shape == (len(x), 3, 16) and planes.dtype == torch.uint8
    assert (scales == scale).all()
    step = scale * 2.0**-21
    held = torch.where(x.abs() >= scale * 2.0**-14, x.double(), (x.double() / step).round() * step)
    assert torch.equal(fp12.dequantize(planes, scales).double(), held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_vector_with_what_is_too_large_is_read_as_nan(dtype: torch.dtype) -> None:
    """Nothing is clipped: what has no number to be held as ends who reads it. The largest is 65,280."""
    held = fp12.dequantize(*fp12.quantize(torch.tensor([[65376.0, -65280.0, 0.0, 1.0] * 8]).to(dtype)))
    assert held[0, :4].tolist() == [65280.0, -65280.0, 0.0, 1.0]
    for large in (65408.0, -65504.0, 65536.0, 1e9, torch.inf, torch.nan):
        held = fp12.dequantize(*fp12.quantize(torch.tensor([[1.0, large, 0.0, 1.0] * 8]).to(dtype)))
        assert held.isnan().all(), large


def test_other_types_are_rounded_to_bf16_first() -> None:
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(fp12.quantize(x), fp12.quantize(x.bfloat16()), strict=True):
        assert torch.equal(ours, theirs)


@triton.jit
def quantize_kernel(
    x: tl.tensor, planes: tl.tensor, scales: tl.tensor, HALF: tl.constexpr, ROWS: tl.constexpr
) -> None:
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    first, second = tl.load(x + row * 2 * HALF + column), tl.load(x + row * 2 * HALF + HALF + column)
    broken = is_broken(first, fp12.BEYOND_BITS) | is_broken(second, fp12.BEYOND_BITS)
    first, second = fp12.nearest_bf16(first), fp12.nearest_bf16(second)
    peak = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
    scale, inverse = fp12.scale_of(peak)
    tl.store(scales + row, tl.where(tl.max(broken, axis=1, keep_dims=True) > 0, float("nan"), scale))
    first, second = fp12.as_held(first * inverse), fp12.as_held(second * inverse)
    first, second = fp12.to_words(first), fp12.to_words(second)
    fp12.store_planes(planes + row * (3 * HALF // 2), first, second, row >= 0, HALF, 1)


def test_the_kernels_round_as_torch_does(device: torch.device) -> None:
    """Numbers of every size, what lies halfway between a bf16 and the next, zeros, tiny and huge vectors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator)
    x[:64] *= torch.logspace(-9, 0, 64)  # within a vector
    x[64:128] *= torch.logspace(-12, 7, 64)[:, None]
    halfway = (FINITE.bfloat16().view(torch.int16).int() << 16 | 0x8000).view(torch.float32)
    halfway = halfway[(halfway.abs() < 4) & (halfway.abs() > 2.0**-20)]
    x[128:192] = halfway[torch.randint(len(halfway), (64, 64), generator=generator)]
    x[192:200] = 0.0
    x[200:208] = 1e9
    x[208:212, 5], x[212:216, 5] = 65376.0, 65408.0
    planes = torch.empty(256, 3, 32, dtype=torch.uint8, device=device)
    scales = torch.empty(256, dtype=torch.float16, device=device)
    quantize_kernel[(1,)](x.to(device), planes.view(torch.int16), scales, 32, 256)
    expected_planes, expected_scales = fp12.quantize(x)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=0, atol=0, equal_nan=True)
    assert (
        scales[200:208].isnan().all() and (scales[208:212] == 2.0**15).all() and scales[212:216].isnan().all()
    )
    whole = ~expected_scales.isnan()
    assert torch.equal(planes.cpu()[whole], expected_planes[whole])
