"""How far a token lets a state go on: the softplus of what a layer gives."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(x)), also where that is far below 1; NaN stays."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    # log(1 + small): what the sum loses of a small number, the quotient makes up for (Higham 2002, 1.14.1).
    kept = tl.where(whole == 1.0, 1.0, whole - 1.0)
    return tl.where(x > 0.0, x, 0.0) + tl.where(whole == 1.0, small, tl.log(whole) * (small / kept))


@triton.jit
def time_steps(dt: tl.tensor, bias: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return softplus(dt + bias) within the limits; NaN stays."""
    steps = softplus(dt.to(tl.float32) + bias)
    steps = tl.where(steps < low, low, steps)
    return tl.where(steps > high, high, steps)
