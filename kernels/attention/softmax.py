"""What turns scores into weights where a layer's attention is more than a softmax: slopes, a cap, and sinks.

By its slope a head's score falls with each token between key and query (ALiBi; Press et al. 2022). A cap
keeps scores below a number (Gemma 2): softcap · tanh(score / softcap). A sink is the score of a key without a
value that a head sees besides (gpt-oss; Xiao et al. 2023): weights need not sum to one.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def capped(scores: tl.tensor, softcap_log2: tl.tensor) -> tl.tensor:
    """Return softcap · tanh(scores / softcap); softcap and scores are times log2(e), and so is this."""
    return softcap_log2 - 2.0 * softcap_log2 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / softcap_log2)))


@triton.jit
def load_of_heads(values: tl.tensor, head: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return the sinks or slopes of heads, times log2(e); 0 where masked."""
    return tl.load(values + head, mask=mask, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def sloped(
    scores: tl.tensor, slope: tl.tensor, position: tl.tensor, first_key: tl.tensor, KEYS: tl.constexpr
) -> tl.tensor:
    """Return scores [M, KEYS] of keys from `first_key` on, less slope [M] for each token up to `position`.

    position: of the queries, [M, 1] or one of all. Scores and slope are times log2(e).
    """
    key = first_key + tl.arange(0, KEYS)
    return scores + slope[:, None] * (key[None, :] - position).to(tl.float32)


def weights_reference(
    scores: Tensor, hidden: Tensor | None, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Return the weights of scaled scores [..., keys] in plain torch, which may be overwritten.

    hidden: which keys are not seen, None: all are. sinks: broadcast against scores [..., 1].
    """
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if hidden is not None:
        scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.float()
    peak = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - peak).exp_()
    return weights / (weights.sum(-1, keepdim=True) + (sinks - peak).exp_())
