"""How far a gated delta rule's tokens let states decay, and how much they correct (Yang et al. 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.recurrence.time_steps import softplus

NUMBERS, WARPS = 512, 4  # that a program has of each, if there are so many


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return decays [T, H] as logarithms in fp32, and betas [T, H] in b's dtype, for `gated_delta_rule`.

    A decay is -exp(a_log) softplus(a + dt_bias), and a beta sigmoid(b), of a and b [T, H], a_log and dt_bias
    [H]. Raise ValueError if shapes do not fit together.
    """
    _check(a, b, a_log, dt_bias)
    a, b = (each if each.stride(1) == 1 else each.contiguous() for each in (a, b))
    tokens, heads = a.shape
    decays = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    betas = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    if tokens:
        padded = triton.next_power_of_2(heads)
        rows = max(1, NUMBERS // padded)
        _gates_kernel[(triton.cdiv(tokens, rows),)](
            a, b, a_log.contiguous(), dt_bias.contiguous(), decays, betas, tokens, a.stride(0), b.stride(0),
            heads, padded, rows, num_warps=WARPS, **dependent_launch(a.device),
        )  # fmt: skip
    return decays, betas


def delta_gates_reference(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same as `delta_gates` in plain torch."""
    _check(a, b, a_log, dt_bias)
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()


def _check(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
    if a.dim() != 2 or b.shape != a.shape or not a_log.shape == dt_bias.shape == a.shape[1:]:
        raise ValueError(
            f"a {tuple(a.shape)}, b {tuple(b.shape)}, a_log {tuple(a_log.shape)} and dt_bias "
            f"{tuple(dt_bias.shape)} do not fit: expected [T, H] twice and [H] twice"
        )


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("a_log_ptr", "dt_bias_ptr"))


@triton.jit
def _gates_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    betas_ptr: tl.tensor,
    tokens: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)
    there = head < HEADS
    rates = -tl.exp(tl.load(a_log_ptr + head, there, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head, there, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    inside = (token < tokens)[:, None] & there[None, :]
    a = tl.load(a_ptr + token[:, None] * a_stride + head[None, :], inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token[:, None] * b_stride + head[None, :], inside, other=0.0).to(tl.float32)
    places = token[:, None] * HEADS + head[None, :]
    tl.store(decays_ptr + places, rates[None, :] * softplus(a + bias[None, :]), inside)
    tl.store(betas_ptr + places, tl.sigmoid(b).to(betas_ptr.dtype.element_ty), inside)
