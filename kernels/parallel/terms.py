"""The sum of terms that lie one behind the other, in their order: of all ranks' once they are here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch

BLOCK = 2048


def sum_terms(terms: Tensor) -> Tensor:
    """Add terms [S, N], contiguous, in fp32 and in their order -> [N], rounded once."""
    count, length = terms.shape
    total = torch.empty(length, dtype=terms.dtype, device=terms.device)
    if length:
        launch = dependent_launch(terms.device)
        _sum_kernel[triton.cdiv(length, BLOCK),](terms, total, length, count, BLOCK, num_warps=8, **launch)
    return total


def sum_terms_reference(terms: Tensor) -> Tensor:
    """Do the same as `sum_terms` in plain torch."""
    total = torch.zeros(terms.shape[1:], dtype=torch.float32, device=terms.device)
    for term in terms:
        total += term.float()
    return total.to(terms.dtype)


@triton.jit
def _sum_kernel(
    terms_ptr: tl.tensor,
    total_ptr: tl.tensor,
    length: tl.tensor,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    width = tl.cast(length, tl.int64)  # a length of 1 is no tensor
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    total = tl.zeros([BLOCK], tl.float32)
    for term in tl.static_range(TERMS):
        total += tl.load(terms_ptr + width * term + place, inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + place, total.to(total_ptr.dtype.element_ty), inside)
