"""What min-p, top-k and top-p keep of a row of logits, as one number: the lowest logit kept.

Temperature keeps the order of the logits, so every filter is a threshold on the raw ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from kernels.sampling import SamplingState

BLOCK = 4096  # tokens that the search looks at in one go
PIVOTS = 4  # cuts that one pass over the row makes in the search interval
MIN_TEMPERATURE = 1e-20  # keeps (logit - max) / temperature free of 0 / 0


def keep_thresholds(logits: Tensor, rows: Tensor, state: SamplingState) -> Tensor:
    """The lowest logit that each row of logits [S, V] keeps, [S] fp32, as `keep_thresholds_reference`.

    Each is found by narrowing an interval of representable values, never by sorting. The result is exact
    for min-p and top-k, and within fp32 summation for top-p.
    """
    thresholds = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _threshold_kernel[(len(logits),)](
        logits,
        rows,
        state.temperature,
        state.top_p,
        state.top_k,
        state.min_p,
        thresholds,
        logits.stride(0),
        logits.shape[1],
        MIN_TEMPERATURE,
        PIVOTS,
        BLOCK,
        num_warps=16,
    )
    return thresholds


def keep_thresholds_reference(logits: Tensor, state: SamplingState) -> Tensor:
    """The lowest logit that each row of logits [S, V] keeps, [S] fp32; state's rows match the logits'.

    min-p keeps p >= min_p * max p; top-k then the k largest; top-p then the fewest of the highest values
    whose renormalised mass reaches top_p. Tokens that tie with the last one kept are kept.
    """
    logits = logits.float()
    highest = logits.amax(dim=1)
    thresholds = highest + state.temperature * state.min_p.log()
    thresholds = torch.where(state.min_p > 0, thresholds, -torch.inf)
    cut = ((state.top_k > 0) | (state.top_p < 1)).nonzero().squeeze(1)
    if not len(cut):
        return thresholds

    ordered = logits[cut].sort(dim=1, descending=True).values
    top_k = state.top_k[cut].long()
    kth = ordered.gather(1, (top_k - 1).clamp(0, ordered.shape[1] - 1).unsqueeze(1)).squeeze(1)
    limit = torch.where(top_k > 0, torch.maximum(thresholds[cut], kth), thresholds[cut]).unsqueeze(1)
    temperature = state.temperature[cut].clamp(min=MIN_TEMPERATURE).unsqueeze(1)
    scaled = (ordered - highest[cut].unsqueeze(1)) / temperature
    mass = scaled.double().exp().masked_fill(ordered < limit, 0).cumsum(dim=1)
    top_p = state.top_p[cut].double().unsqueeze(1)
    last = (mass < top_p * mass[:, -1:]).sum(dim=1, keepdim=True)  # first place whose mass reaches top_p
    nucleus = ordered.gather(1, last.clamp(max=ordered.shape[1] - 1))
    thresholds[cut] = torch.where(top_p < 1, torch.maximum(limit, nucleus), limit).squeeze(1)
    return thresholds


@triton.jit
def _threshold_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    stride: tl.tensor,
    VOCABULARY: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sample)
    temperature = tl.load(temperature_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    threshold = float("-inf")
    if (temperature > 0) & ((top_p < 1) | (top_k > 0) | (min_p > 0)):
        logits_row = logits_ptr + sample * stride
        column = tl.arange(0, BLOCK)
        peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            inside = start + column < VOCABULARY
            x = tl.load(logits_row + start + column, inside, other=float("-inf"))
            peaks = tl.maximum(peaks, x.to(tl.float32))
        highest = tl.max(peaks)
        if min_p > 0:
            threshold = highest + temperature * tl.log(min_p)
        if top_k > 0:
            kth = _lowest_kept(
                logits_row, highest, threshold, 0.0, top_k.to(tl.float32), False, VOCABULARY, PIVOTS, BLOCK
            )
            threshold = tl.maximum(threshold, kth)
        if top_p < 1:
            sharpness = 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)
            everything = tl.full((PIVOTS,), float("-inf"), tl.float32)
            masses = _masses(
                logits_row, highest, threshold, sharpness, everything, True, VOCABULARY, PIVOTS, BLOCK
            )
            target = top_p * tl.max(masses)
            nucleus = _lowest_kept(
                logits_row, highest, threshold, sharpness, target, True, VOCABULARY, PIVOTS, BLOCK
            )
            threshold = tl.maximum(threshold, nucleus)
    tl.store(thresholds_ptr + sample, threshold)


@triton.jit
def _lowest_kept(
    logits_row: tl.tensor,
    highest: tl.tensor,
    floor: tl.tensor,
    sharpness: tl.tensor,
    target: tl.tensor,
    WEIGHTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest value such that the logits from it up weigh target or more (see `_masses`)."""
    dtype: tl.constexpr = logits_row.dtype.element_ty
    low = tl.max(_to_order(tl.full((1,), float("-inf"), dtype)))  # reaches the target, or nothing does
    high = tl.max(_to_order(tl.full((1,), 0.0, dtype) + highest.to(dtype))) + 1  # does not reach it
    while high - low > 1:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        cuts = low + step * (1 + tl.arange(0, PIVOTS)).to(tl.int64)
        pivots = _from_order(tl.minimum(cuts, high - 1), dtype)
        masses = _masses(logits_row, highest, floor, sharpness, pivots, WEIGHTED, VOCABULARY, PIVOTS, BLOCK)
        reached = tl.sum(((masses >= target) & (cuts < high)).to(tl.int64))
        low += step * reached
        high = tl.minimum(low + step, high)
    return tl.max(_from_order(low + tl.zeros((1,), tl.int64), dtype))


@triton.jit
def _masses(
    logits_row: tl.tensor,
    highest: tl.tensor,
    floor: tl.tensor,
    sharpness: tl.tensor,
    pivots: tl.tensor,
    WEIGHTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """[PIVOTS]: how many logits reach floor and the pivot; weighted, the sum of their exponentials."""
    column = tl.arange(0, BLOCK)
    sums = tl.zeros((PIVOTS, BLOCK), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        inside = start + column < VOCABULARY
        x = tl.load(logits_row + start + column, inside, other=float("-inf")).to(tl.float32)
        weight = (x >= floor).to(tl.float32)
        if WEIGHTED:
            weight *= tl.exp((x - highest) * sharpness)
        sums += tl.where(x[None, :] >= pivots[:, None], weight[None, :], 0.0)
    return tl.sum(sums, axis=1)


@triton.jit
def _to_order(x: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats x."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    else:
        half_bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        return (half_bits ^ ((half_bits >> 31) & 0x7FFF)).to(tl.int64)


@triton.jit
def _from_order(order: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The floats, in fp32, that `_to_order` gave these integers."""
    bits = order.to(tl.int32)
    if dtype == tl.float32:
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        return (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
