"""Which tokens have the highest scores, for many tokens at once, each of which sees so many of its row.

One program finds them for one token: the lowest score that is chosen, eight bits at a time by how many scores
begin with each, then the places of all above it and of the first that equal it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 16
MOST_KEYS = 1 << 16  # with more, a few tokens' are found sooner by many programs each
FEW_TOKENS = 32


def best_tokens(scores: Tensor, positions: Tensor, most: int) -> Tensor:
    """Return the places [T, most] of the highest scores [T, L] of tokens at positions [T].

    Of a token that sees no more than `most`, what is returned says nothing. Of equal scores the first are
    taken.
    """
    tokens, longest = scores.shape
    if tokens <= FEW_TOKENS and longest > MOST_KEYS:
        return best_tokens_reference(scores, positions, most)
    best = torch.zeros(tokens, most, dtype=torch.int32, device=scores.device)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(longest))
        _best_kernel[(tokens,)](
            best, scores, positions, longest, most, BLOCK=block, num_warps=WARPS if block == BLOCK else 4
        )
    return best


def best_tokens_reference(scores: Tensor, positions: Tensor, most: int) -> Tensor:
    """Do the same as `best_tokens` in plain torch, but of equal scores any are taken."""
    unseen = torch.arange(scores.shape[1], device=scores.device) > positions[:, None]
    return scores.masked_fill(unseen, -torch.inf).topk(most, dim=-1, sorted=False).indices


@triton.jit
def _ordered(scores: tl.tensor) -> tl.tensor:
    """Return unsigned numbers that are in the order of fp32 scores; both zeros are one."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -0x80000000).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["longest", "most"])
def _best_kernel(
    best: tl.tensor,
    scores: tl.tensor,
    positions: tl.tensor,
    longest: tl.tensor,
    most: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The best of one token."""
    token = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(positions + token) + 1, longest)
    if count <= most:
        return
    own = scores + token * longest
    each = tl.arange(0, BLOCK)
    bins = tl.arange(0, 256)
    prefix = tl.zeros([], tl.uint32)
    wanted = most  # of those that begin with `prefix`
    for shift in tl.static_range(24, -1, -8):
        found = tl.zeros([256], tl.int32)
        for begin in range(0, count, BLOCK):
            inside = begin + each < count
            order = _ordered(tl.load(own + begin + each, mask=inside, other=0.0))
            if shift < 24:
                inside = inside & ((order >> (shift + 8)) == prefix)
            found += tl.histogram(((order >> shift) & 0xFF).to(tl.int32), 256, mask=inside)
        enough = tl.cumsum(found, reverse=True) >= wanted
        chosen = tl.sum(enough.to(tl.int32)) - 1
        wanted -= tl.sum(tl.where(bins > chosen, found, 0))
        prefix = (prefix << 8) | chosen.to(tl.uint32)

    taken = tl.zeros([], tl.int32)
    equal = tl.zeros([], tl.int32)
    for begin in range(0, count, BLOCK):
        inside = begin + each < count
        order = _ordered(tl.load(own + begin + each, mask=inside, other=0.0))
        is_equal = inside & (order == prefix)
        before = equal + tl.cumsum(is_equal.to(tl.int32))
        takes = (inside & (order > prefix)) | (is_equal & (before <= wanted))
        place = taken + tl.cumsum(takes.to(tl.int32)) - 1
        tl.store(best + token * most + place, begin + each, mask=takes)
        equal += tl.sum(is_equal.to(tl.int32))
        taken += tl.sum(takes.to(tl.int32))
