"""To which experts a token goes, from a router's logits: those with the largest scores, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch


@dataclass(frozen=True, slots=True)
class Divisor:
    """What chosen scores are divided by: their sum and `added`, but no less than `least`."""

    added: float = 0.0
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses `top` experts, and what these weigh.

    scores: what logits are made into. groups: experts stand in so many; only the `kept` ones with the best
    expert, or with the best `two` by their sum, may be chosen from. scale: of weights, in the end.
    """

    top: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    divisor: Divisor | None = None
    scale: float = 1.0
    groups: int = 1
    kept: int = 1
    group_by: Literal["best", "two"] = "best"

    @property
    def by_logits(self) -> bool:
        """Tell whether logits order experts and groups as their scores do."""
        return self.scores == "softmax" and self.group_by == "best"


def route(logits: Tensor, routing: Routing, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Choose experts by logits [T, E] -> (weights [T, top] of dtype, index [T, top] i64), largest first.

    bias [E]: added to the scores that experts are chosen by, and not to their weights. Of equals the first is
    chosen. In fp32, whatever the logits are. What is no number comes last, and then an expert may come twice.
    """
    tokens, experts = logits.shape
    weights = torch.empty(tokens, routing.top, dtype=dtype, device=logits.device)
    index = torch.empty(tokens, routing.top, dtype=torch.int64, device=logits.device)
    size = experts // routing.groups
    divisor = routing.divisor or Divisor()
    if tokens:
        _route_kernel[(tokens,)](
            logits, bias, weights, index, logits.stride(0), divisor.added, divisor.least, routing.scale,
            EXPERTS=experts, SIZE=size, SIZE_PADDED=triton.next_power_of_2(size),
            GROUPS=routing.groups, GROUPS_PADDED=triton.next_power_of_2(routing.groups), KEPT=routing.kept,
            TWO=routing.group_by == "two", TOP=routing.top, TOP_PADDED=triton.next_power_of_2(routing.top),
            SIGMOID=routing.scores == "sigmoid", BY_LOGITS=routing.by_logits and bias is None,
            NORMALIZED=routing.divisor is not None, num_warps=1, **dependent_launch(logits.device),
        )  # fmt: skip
    return weights, index


def route_reference(
    logits: Tensor, routing: Routing, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Do the same as `route` in plain torch."""
    scores = scores_of(logits, routing)
    index = chosen_by(scores, routing, bias)
    return weights_of(scores.gather(1, index), routing).to(dtype), index


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """Return the scores [T, E] fp32 of logits."""
    return logits.float().sigmoid() if routing.scores == "sigmoid" else logits.float().softmax(-1)


def chosen_by(scores: Tensor, routing: Routing, bias: Tensor | None) -> Tensor:
    """Return which experts [T, top] are chosen by scores [T, E]."""
    scores = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = scores.unflatten(1, (routing.groups, -1))
        best = grouped.topk(2 if routing.group_by == "two" else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(routing.kept, dim=-1).indices, True)
        scores = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    return scores.topk(routing.top, dim=-1).indices


def weights_of(chosen: Tensor, routing: Routing) -> Tensor:
    """Return the weights of the chosen experts by their scores [T, top]."""
    if (divisor := routing.divisor) is not None:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + divisor.added).clamp(min=divisor.least)
    return chosen * routing.scale


LEAST = tl.constexpr(-(1 << 31))


@triton.jit
def _ordered(numbers: tl.tensor) -> tl.tensor:
    """Return int32 in the order of fp32 numbers, those that are none first: a warp compares them at once."""
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)
    is_number = (numbers < 0.0) | (numbers >= 0.0)
    return tl.where(is_number, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)


@triton.jit
def _of_ordered(key: tl.tensor) -> tl.tensor:
    """Return the number that `_ordered` made `key` of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _route_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    index_ptr: tl.tensor,
    stride: tl.tensor,
    added: tl.tensor,
    least: tl.tensor,
    scale: tl.tensor,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    KEPT: tl.constexpr,
    TWO: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    NORMALIZED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Route a token. `order` is what experts are chosen by, -inf once one cannot be."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, GROUPS_PADDED * SIZE_PADDED)  # each group filled up to a power of two
    inside = (place % SIZE_PADDED < SIZE) & (place // SIZE_PADDED < GROUPS)
    expert = tl.where(inside, place // SIZE_PADDED * SIZE + place % SIZE_PADDED, EXPERTS - 1)
    logits = tl.load(logits_ptr + token * stride + expert, inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        best_logit = tl.max(logits, 0)
        exponents = tl.exp(logits - best_logit)
        total = tl.sum(exponents, 0)
        scores = exponents / total
    if BY_LOGITS:
        order = logits
    else:
        order = scores
        if bias_ptr is not None:
            order += tl.load(bias_ptr + expert, inside, other=0.0).to(tl.float32)
        order = tl.where(inside, order, float("-inf"))
    if GROUPS > 1:
        tile = tl.reshape(order, [GROUPS_PADDED, SIZE_PADDED])
        best = tl.max(tile, 1)
        if TWO:
            member = tl.arange(0, SIZE_PADDED)[None, :]
            first = tl.min(tl.where(tile == best[:, None], member, SIZE_PADDED - 1), 1)
            best += tl.max(tl.where(member == first[:, None], float("-inf"), tile), 1)
        group = tl.arange(0, GROUPS_PADDED)
        kept = group < 0
        for _ in tl.static_range(KEPT):
            largest = tl.max(best, 0)
            which = tl.min(tl.where(best == largest, group, GROUPS - 1), 0)
            kept = kept | (group == which)
            best = tl.where(group == which, float("-inf"), best)
        order = tl.reshape(tl.where(kept[:, None], tile, float("-inf")), [GROUPS_PADDED * SIZE_PADDED])
    rank = tl.arange(0, TOP_PADDED)
    weights = tl.zeros([TOP_PADDED], tl.float32)
    index = tl.zeros([TOP_PADDED], tl.int32)
    key = _ordered(order)
    for chosen in tl.static_range(TOP):
        largest = tl.max(key, 0)
        which = tl.min(tl.where(key == largest, expert, EXPERTS - 1), 0)
        taken = expert == which
        if BY_LOGITS:  # its score is known without a look for it
            score = tl.exp(_of_ordered(largest) - best_logit) / total
        else:  # bits of numbers that are not negative are in their order, too
            bits = tl.max(tl.where(taken & inside, scores.to(tl.int32, bitcast=True), 0), 0)
            score = bits.to(tl.float32, bitcast=True)
        weights = tl.where(rank == chosen, score, weights)
        index = tl.where(rank == chosen, which, index)
        key = tl.where(taken, LEAST, key)
    if NORMALIZED:
        weights /= tl.maximum(tl.sum(weights, 0) + added, least)
    weights *= scale
    fits = rank < TOP
    tl.store(weights_ptr + token * TOP + rank, weights.to(weights_ptr.dtype.element_ty), fits)
    tl.store(index_ptr + token * TOP + rank, index.to(tl.int64), fits)
