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


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, most: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return decays as logarithms in fp32, and betas [T, H] in b's dtype, for `gated_delta_rule`.

    A decay is -exp(a_log) softplus(a + dt_bias), and a beta most · sigmoid(b), of b [T, H] and a_log [H]. Of
    a [T, H] and dt_bias [H] decays are [T, H], and [T, H, D] of a [T, H · D] and dt_bias [H · D] (Kimi Delta
    Attention). Raise ValueError if shapes do not fit together.
    """
    check_gates(a, b, a_log, dt_bias)
    a, b = (each if each.stride(1) == 1 else each.contiguous() for each in (a, b))
    (tokens, heads), numbers = b.shape, a.shape[1]
    decays = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    factors = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    given = (a, b, a_log.contiguous(), dt_bias.contiguous(), decays, factors)
    if tokens and numbers == heads:
        padded = triton.next_power_of_2(heads)
        rows = max(1, NUMBERS // padded)
        _gates_kernel[(triton.cdiv(tokens, rows),)](
            *given, tokens, a.stride(0), b.stride(0), most, heads, padded, rows, num_warps=WARPS,
            **dependent_launch(a.device),
        )  # fmt: skip
    elif tokens:
        _gates_by_key_kernel[(tokens, triton.cdiv(numbers, NUMBERS))](
            *given, a.stride(0), b.stride(0), most, heads, triton.next_power_of_2(heads), numbers, NUMBERS,
            num_warps=WARPS, **dependent_launch(a.device),
        )  # fmt: skip
    return decays if numbers == heads else decays.unflatten(1, (heads, -1)), factors


def delta_gates_reference(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, most: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Do the same as `delta_gates` in plain torch."""
    check_gates(a, b, a_log, dt_bias)
    steps, rates = F.softplus(a.float() + dt_bias.float()), -a_log.float().exp()
    if a.shape != b.shape:
        steps, rates = steps.unflatten(1, (len(a_log), -1)), rates[:, None]
    return rates * steps, b.sigmoid() * most


def check_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
    """Raise ValueError if shapes of what `delta_gates` takes do not fit together."""
    fits = a.dim() == b.dim() == 2 and len(a) == len(b) and a_log.shape == b.shape[1:]
    if not fits or dt_bias.shape != a.shape[1:] or a.shape[1] % b.shape[1]:
        raise ValueError(
            f"a {tuple(a.shape)}, b {tuple(b.shape)}, a_log {tuple(a_log.shape)} and dt_bias "
            f"{tuple(dt_bias.shape)} do not fit: expected [T, H] twice and [H] twice, or [T, H · D], [T, H], "
            "[H] and [H · D]"
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
    most: tl.tensor,
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
    tl.store(betas_ptr + places, betas(b, most, betas_ptr.dtype.element_ty), inside)


@triton.jit
def betas(b: tl.tensor, most: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return most · sigmoid(b), of b in fp32, which is rounded before it is multiplied."""
    return (tl.sigmoid(b).to(DTYPE).to(tl.float32) * most).to(DTYPE)


@triton.jit
def _gates_by_key_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    betas_ptr: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    most: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute a block of a token's decays, of NUMBERS; its first program the betas, too."""
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = number < NUMBERS
    rates = -tl.exp(tl.load(a_log_ptr + number // (NUMBERS // HEADS), there, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + number, there, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    a = tl.load(a_ptr + token * a_stride + number, there, other=0.0).to(tl.float32)
    tl.store(decays_ptr + token * NUMBERS + number, rates * softplus(a + bias), there)
    if tl.program_id(1) == 0:
        head = tl.arange(0, HEADS_PADDED)
        b = tl.load(b_ptr + token * b_stride + head, head < HEADS, other=0.0).to(tl.float32)
        tl.store(betas_ptr + token * HEADS + head, betas(b, most, betas_ptr.dtype.element_ty), head < HEADS)
