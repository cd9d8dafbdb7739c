"""To which experts a token goes, from a router's scores: the largest ones, and their weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch


def route(
    logits: Tensor, top: int, dtype: torch.dtype, *, all_first: bool, normalized: bool
) -> tuple[Tensor, Tensor]:
    """Choose the largest of logits [T, E] -> (weights [T, top] of dtype, index [T, top] i64), largest first.

    Weights are the softmax of the chosen logits; with `all_first` of all logits, divided by their sum if
    `normalized`. Of equals the first is chosen.
    """
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top, dtype=dtype, device=logits.device)
    index = torch.empty(tokens, top, dtype=torch.int64, device=logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits, weights, index, logits.stride(0), experts, triton.next_power_of_2(experts), top,
            triton.next_power_of_2(top), all_first, normalized or not all_first,
            num_warps=1, **dependent_launch(logits.device),
        )  # fmt: skip
    return weights, index


def route_reference(
    logits: Tensor, top: int, dtype: torch.dtype, *, all_first: bool, normalized: bool
) -> tuple[Tensor, Tensor]:
    """Do the same as `route` in plain torch."""
    chosen, index = logits.float().topk(top, dim=-1)
    if not all_first or normalized:  # what all have in common is divided out
        return chosen.softmax(-1).to(dtype), index
    return logits.float().softmax(-1).gather(1, index).to(dtype), index


@triton.jit
def _route_kernel(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    index_ptr: tl.tensor,
    stride: tl.tensor,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    ALL_FIRST: tl.constexpr,
    NORMALIZED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    logits = tl.load(logits_ptr + token * stride + expert, expert < EXPERTS, other=float("-inf"))
    logits = logits.to(tl.float32)
    peak = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - peak), 0)
    place = tl.arange(0, TOP_PADDED)
    weights = tl.zeros([TOP_PADDED], tl.float32)
    index = tl.zeros([TOP_PADDED], tl.int32)
    for chosen in tl.static_range(TOP):
        largest = tl.max(logits, 0)
        which = tl.min(tl.where(logits == largest, expert, EXPERTS - 1), 0)  # the last, where all are NaN
        weights = tl.where(place == chosen, tl.exp(largest - peak), weights)
        index = tl.where(place == chosen, which, index)
        logits = tl.where(expert == which, float("-inf"), logits)
    if NORMALIZED:
        weights /= tl.sum(weights, 0)
    else:
        weights /= total
    inside = place < TOP
    tl.store(weights_ptr + token * TOP + place, weights.to(weights_ptr.dtype.element_ty), inside)
    tl.store(index_ptr + token * TOP + place, index.to(tl.int64), inside)
