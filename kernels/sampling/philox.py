"""Counter-based randomness: Philox4x32-10 (Salmon et al. 2011), and an exponential variate from each word.

Triton has Philox built in (`tl.philox`); the reference here is the same function in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xCD9E8D57, 0xD2511F53)  # of the counter's words 2 and 0
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # what a round adds to the key's words


def philox_reference(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Four 32-bit words [..., 4], in int64, of the key `seed` (64 bits, int64) and a counter of four words.

    seed and the counter's words broadcast against each other.
    """
    c0, c1, c2, c3, seed = torch.broadcast_tensors(*counter, seed)
    multipliers, steps = (
        torch.tensor(pair, device=seed.device).view(2, *[1] * seed.dim()) for pair in (MULTIPLIERS, KEY_STEPS)
    )
    key = torch.stack((seed, seed >> 32)) & MASK
    even, odd = torch.stack((c0, c2)), torch.stack((c1, c3))
    for _ in range(10):
        # The products wrap modulo 2^64, which leaves all of their 64 bits right.
        products = even.flip(0) * multipliers
        even = ((products >> 32) & MASK) ^ odd ^ key
        odd = products & MASK
        key = (key + steps) & MASK
    return torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1)


def log_exponential_reference(word: Tensor) -> Tensor:
    """Return log of an Exp(1) variate, -log(1 - u) with u = (word + 1/2) / 2^32, in fp32.

    The smallest variates decide a Gumbel-max draw; u is near 0 there, where fp32 keeps all 32 bits.
    """
    u = ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return torch.log(-torch.log1p(-u))


@triton.jit
def _log(x: tl.tensor, ON_GPU: tl.constexpr) -> tl.tensor:
    if ON_GPU:
        return libdevice.fast_logf(x)  # the special function unit's, an eighth of the instructions
    else:
        return tl.log(x)


@triton.jit
def log_exponential(word: tl.tensor, ON_GPU: tl.constexpr) -> tl.tensor:
    """Do the same as `log_exponential_reference` of uint32 words, within 2e-5."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # The logarithm of 1 - u loses the low bits of a small u; the series of -log(1 - u) keeps them.
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * 0.25)))
    return _log(tl.where(u < 0.03125, series, -_log(1.0 - u, ON_GPU)), ON_GPU)
