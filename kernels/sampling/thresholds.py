"""What min-p, top-k and top-p keep of a row of logits, as one number: the lowest logit kept.

Temperature keeps the order of the logits, so every filter is a threshold on the raw ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.sampling.state import SamplingState

BLOCK = 8192  # tokens that the search looks at in one go
MIN_TEMPERATURE = 1e-20  # keeps (logit - max) / temperature free of 0 / 0


def keep_thresholds(logits: Tensor, rows: Tensor, state: SamplingState) -> Tensor:
    """Return the lowest logit that each row keeps, [S] fp32, as `keep_thresholds_reference`.

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
        BLOCK,
        num_warps=32,
        **dependent_launch(logits.device),
    )
    return thresholds


def keep_thresholds_reference(logits: Tensor, state: SamplingState) -> Tensor:
    """Return the lowest logit that each row of logits [S, V] keeps, [S] fp32; state's rows match.

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
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sample)
    temperature = tl.load(temperature_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    threshold = float("-inf")
    if (temperature > 0) & ((top_p < 1) | (top_k > 0) | (min_p > 0)):
        logits = logits_ptr + sample * stride
        column = tl.arange(0, BLOCK)
        peaks = tl.full((BLOCK,), float("-inf"), tl.float32)  # of every BLOCK-th token
        for start in range(0, VOCABULARY, BLOCK):
            inside = start + column < VOCABULARY
            x = tl.load(logits + start + column, inside, other=float("-inf"))
            peaks = tl.maximum(peaks, x.to(tl.float32))
        highest = tl.max(peaks)
        if min_p > 0:
            threshold = highest + temperature * tl.log(min_p)
        if top_k > 0:
            bound = tl.maximum(threshold, _kth_peak(peaks, highest, top_k, logits.dtype.element_ty))
            kth = _lowest_kept(logits, highest, bound, 0.0, top_k.to(tl.float32), False, VOCABULARY, BLOCK)
            threshold = tl.maximum(threshold, kth)
        if top_p < 1:
            sharpness = 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)
            mass, _, _ = _masses(
                logits, highest, sharpness, threshold, highest, highest, True, VOCABULARY, BLOCK
            )
            # Even V tokens below this bound weigh less than half of what the nucleus may leave out.
            depth = tl.log(2.0 * VOCABULARY / ((1 - top_p) * mass))
            bound = tl.maximum(threshold, highest - temperature * tl.maximum(depth, 0.0))
            nucleus = _lowest_kept(logits, highest, bound, sharpness, top_p * mass, True, VOCABULARY, BLOCK)
            threshold = tl.maximum(threshold, nucleus)
    tl.store(thresholds_ptr + sample, threshold)


@triton.jit
def _kth_peak(peaks: tl.tensor, highest: tl.tensor, k: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the largest value that k peaks or more reach, hence at most the k-th largest logit."""
    low = to_order(tl.full((), float("-inf"), dtype))
    high = to_order(highest.to(dtype)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.sum((peaks >= from_order(middle, dtype)).to(tl.int32)) >= k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return from_order(low, dtype)


@triton.jit
def _lowest_kept(
    logits: tl.tensor,
    highest: tl.tensor,
    bound: tl.tensor,
    sharpness: tl.tensor,
    target: tl.tensor,
    WEIGHTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the largest value whose mass (see `_masses`) reaches target, or one that bound already keeps.

    Every pass over the row cuts the interval [low, high) of representable values into four.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    lowest = to_order(tl.full((), float("-inf"), dtype))
    low = tl.maximum(to_order(bound.to(dtype)) - 1, lowest)
    high = to_order(highest.to(dtype)) + 1
    while high - low > 1:
        step = (high - low + 3) // 4
        a, b, c = low + step, low + 2 * step, low + 3 * step
        mass_a, mass_b, mass_c = _masses(
            logits,
            highest,
            sharpness,
            from_order(a, dtype),
            from_order(tl.minimum(b, high), dtype),
            from_order(tl.minimum(c, high), dtype),
            WEIGHTED,
            VOCABULARY,
            BLOCK,
        )
        low = tl.where(mass_a >= target, a, low)
        low = tl.where((mass_b >= target) & (b < high), b, low)
        low = tl.where((mass_c >= target) & (c < high), c, low)
        high = tl.minimum(low + step, high)
    return from_order(low, dtype)


@triton.jit
def _masses(
    logits: tl.tensor,
    highest: tl.tensor,
    sharpness: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    WEIGHTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Count the logits that reach a, b, c; weighted, sum their exp((logit - highest) * sharpness)."""
    column = tl.arange(0, BLOCK)
    sums_a = tl.zeros((BLOCK,), tl.float32)
    sums_b = tl.zeros((BLOCK,), tl.float32)
    sums_c = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        inside = start + column < VOCABULARY
        x = tl.load(logits + start + column, inside, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - highest) * sharpness) if WEIGHTED else 1.0
        sums_a += tl.where(x >= a, weight, 0.0)
        sums_b += tl.where(x >= b, weight, 0.0)
        sums_c += tl.where(x >= c, weight, 0.0)
    return tl.sum(sums_a), tl.sum(sums_b), tl.sum(sums_c)


@triton.jit
def to_order(x: tl.tensor) -> tl.tensor:
    """Return an integer in the order of the floats: of fp32's values, or of 16-bit ones."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    else:
        half_bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        return (half_bits ^ ((half_bits >> 31) & 0x7FFF)).to(tl.int64)


@triton.jit
def from_order(order: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the float, widened to fp32, that `to_order` gave this integer."""
    bits = order.to(tl.int32)
    if dtype == tl.float32:
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        return (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
