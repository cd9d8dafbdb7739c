"""How an fp8 cache rounds."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.formats.fp8 import BEYOND_BITS, DTYPE, quantize, scale_of, to_e4m3
from quire.kernels.formats.kv_scales import is_broken

E4M3 = torch.arange(256, dtype=torch.uint8).view(DTYPE)
FINITE = E4M3[~E4M3.float().isnan()].float().unique()


@pytest.mark.parametrize("magnitude", [1e-12, 1e-3, 1.0, 1e4])
def test_every_value_becomes_the_nearest_of_the_scaled_grid(magnitude: float) -> None:
    x = magnitude * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    values, scales = quantize(x)
    wide = scales.double().unsqueeze(-1)
    error = (values.double() * wide - x.double()).abs()
    nearest = (FINITE.double() * wide.unsqueeze(-1) - x.double().unsqueeze(-1)).abs().amin(-1)
    assert ((error - nearest) <= 1e-6 * x.abs().amax(-1, keepdim=True)).all()
    if magnitude >= 1:  # 1e-3 has the smallest scale already
        assert (values.float().abs().amax(-1) == 448).all()
        assert (error <= x.abs() / 16 + wide * 2.0**-10).all()


@triton.jit
def quantize_kernel(
    x: tl.tensor, values: tl.tensor, scales: tl.tensor, D: tl.constexpr, ROWS: tl.constexpr
) -> None:
    row = tl.arange(0, ROWS)[:, None]
    vector = tl.load(x + row * D + tl.arange(0, D)[None, :])
    scale, inverse = scale_of(tl.max(tl.abs(vector), axis=1, keep_dims=True))
    tl.store(values + row * D + tl.arange(0, D)[None, :], to_e4m3(vector * inverse))
    broken = tl.max(is_broken(vector, BEYOND_BITS), axis=1, keep_dims=True) > 0
    tl.store(scales + row, tl.where(broken, float("nan"), scale))


def test_the_kernels_round_as_torch_does(device: torch.device) -> None:
    """All of e4m3, what lies halfway between its values and beside that, zeros, tiny and huge vectors."""
    halfway = (FINITE[1:] + FINITE[:-1]) / 2
    grid = torch.cat((FINITE, halfway, halfway.nextafter(FINITE[1:]), halfway.nextafter(FINITE[:-1])))
    x = torch.zeros(256, 64)
    x.view(-1)[: len(grid)] = grid
    x[:128, 63] = 448.0  # their scale is 1
    generator = torch.Generator().manual_seed(0)
    x[128:192] = torch.randn(64, 64, generator=generator) * torch.logspace(-12, 7, 64)[:, None]
    x[192:200] = 1e9
    x[200:204, 3], x[204:208, 3] = 65504.0 * 448, 65504.0 * 448 + 2
    values, scales = torch.empty(256, 64, dtype=DTYPE, device=device), torch.empty(256, device=device).half()
    quantize_kernel[(1,)](x.to(device), values, scales, 64, 256)
    expected_values, expected_scales = quantize(x)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=0, atol=0, equal_nan=True)
    whole = ~expected_scales.isnan()
    assert torch.equal(values.cpu().float()[whole], expected_values.float()[whole])
    assert (
        scales[192:200].isnan().all() and (scales[200:204] == 65504).all() and scales[204:208].isnan().all()
    )
