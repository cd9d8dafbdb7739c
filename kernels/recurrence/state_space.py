"""Mamba 2's scan (Dao and Gu 2024, "Transformers are SSMs"): each head's state decays and gets x B^T."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import dependent_launch
from quire.kernels.recurrence.state_space_chunks import (
    chunk_kernel,
    chunk_options,
    chunk_tile,
    time_steps_kernel,
)
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE, StateStep
from quire.kernels.recurrence.time_steps import time_steps

MOST_ROWS, MOST_COLUMNS = 128, 256  # of a head's state

# Decodes: a program has so many numbers of a state in registers, 32 a thread.
DECODE_NUMBERS = 4096
DECODE_WARPS = 4


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    state: Tensor,
    step: StateStep,
) -> Tensor:
    """Scan a step's tokens x [T, H, P] -> [T, H, P] in fp32, and leave the states where the step says.

    Of each head, S [P, N] = exp(d A) S + d x B^T gives S C + D x, where d is softplus(dt + dt_bias) within
    dt_limit. dt [T, H], A [H] in fp32 and negative, B and C [T, G, N], of which each serves H / G heads next
    to each other, D and dt_bias [H]; state [blocks, H, P, N], which is computed in fp32 and may be held in 16
    bits. Tokens of no decode and no chunk get no output: what is there is undefined. Raise ValueError if
    shapes or dtypes do not fit together.
    """
    _check(x, B, C, state)
    x, B, C = _dense(x), _dense(B), _dense(C)
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    _, heads, rows = x.shape
    groups, columns = B.shape[1:]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    sizes = {"HEADS": heads, "SHARING": heads // groups, "ROWS": rows, "COLUMNS": columns}
    strides = x.stride(0), dt.stride(0), B.stride(0), C.stride(0), state.stride(0)
    limits = float(dt_limit[0]), float(dt_limit[1])
    tensors = x, dt, A, B, C, D, dt_bias, state, out
    if step.decodes:
        tile = decode_tile(rows, columns)
        _decode_kernel[(heads * triton.cdiv(rows, tile["TILE_ROWS"]), step.decodes)](
            *tensors, step.before, step.after, *strides, *limits, **sizes, **tile, num_warps=DECODE_WARPS,
            **dependent_launch(x.device),
        )  # fmt: skip
    if len(step.chunks):
        chunks, tile = step.chunks, chunk_tile(heads, rows, columns)
        steps = state.new_empty(len(chunks), heads, 2, CHUNK, dtype=torch.float32)
        time_steps_kernel[(len(chunks), heads)](
            dt, A, dt_bias, chunks, steps, dt.stride(0), *limits, heads, CHUNK, num_warps=1
        )
        chunk_kernel[(heads, triton.cdiv(rows, tile["TILE_ROWS"]))](
            x, steps, B, C, D, state, out, chunks, step.last_used, x.stride(0), B.stride(0), C.stride(0),
            state.stride(0), **sizes, **tile, **chunk_options(x.dtype),
        )  # fmt: skip
    return out


def state_space_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    state: Tensor,
    step: StateStep,
) -> Tensor:
    """Do the same as `state_space_scan` in plain torch, token by token; what is undefined there is 0 here."""
    sharing = x.shape[1] // B.shape[1]
    steps = F.softplus(dt.float() if dt_bias is None else dt.float() + dt_bias.float()).clamp(*dt_limit)
    decays, added = torch.exp(steps * A.float()), steps[..., None] * x.float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    now = nothing = torch.zeros(state.shape[1:], dtype=torch.float32, device=state.device)
    for first, tokens, before, after in step.in_order():
        if before != CARRIED:
            now = nothing if before == NO_STATE else state[before].float()
        for token in range(first, first + tokens):
            wide = B[token].float().repeat_interleave(sharing, 0)
            now = decays[token, :, None, None] * now + added[token, :, :, None] * wide[:, None]
            out[token] = (now * C[token].float().repeat_interleave(sharing, 0)[:, None]).sum(-1)
            if D is not None:
                out[token] += D.float()[:, None] * x[token].float()
        now = now.to(state.dtype).float()  # else it would matter where a step ends
        if after >= 0:
            state[after] = now.to(state.dtype)
    return out


def decode_tile(rows: int, columns: int) -> dict[str, int]:
    """Return how much of a head's state [rows, columns] a program of `_decode_kernel` has, padded."""
    padded = triton.next_power_of_2(columns)
    return {
        "TILE_ROWS": min(triton.next_power_of_2(rows), max(DECODE_NUMBERS // padded, 1)),
        "TILE_COLUMNS": padded,
    }


def _check(x: Tensor, B: Tensor, C: Tensor, state: Tensor) -> None:
    heads, rows = x.shape[1:]
    groups, columns = B.shape[1:]
    if heads % groups or C.shape != B.shape or state.shape[1:] != (heads, rows, columns):
        raise ValueError(
            f"x {tuple(x.shape)}, B {tuple(B.shape)}, C {tuple(C.shape)} and states {tuple(state.shape)} do "
            "not fit: expected [T, H, P], [T, G, N] twice with H a multiple of G, and [blocks, H, P, N]"
        )
    if rows > MOST_ROWS or columns > MOST_COLUMNS:
        raise ValueError(
            f"a head's state is [{rows}, {columns}], and kernels take up to [{MOST_ROWS}, {MOST_COLUMNS}]"
        )
    if not x.dtype == B.dtype == C.dtype:
        raise ValueError(f"x is in {x.dtype}, B in {B.dtype} and C in {C.dtype}: expected one dtype")
    if len(state) and not state[0].is_contiguous():
        raise ValueError(f"a block's states have strides {state.stride()[1:]}: expected them contiguous")


def _dense(tokens: Tensor) -> Tensor:
    """Return the tensor [T, heads, width] with each token's numbers next to each other."""
    return tokens if tokens.stride()[1:] == (tokens.shape[2], 1) else tokens.contiguous()


@triton.jit
def _decode_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    out_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    x_stride: tl.tensor,
    dt_stride: tl.tensor,
    b_stride: tl.tensor,
    c_stride: tl.tensor,
    state_stride: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    SLICES: tl.constexpr = (ROWS + TILE_ROWS - 1) // TILE_ROWS
    head = tl.program_id(0) // SLICES
    row = tl.program_id(0) % SLICES * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)
    there, inside = row < ROWS, column < COLUMNS
    token = tl.program_id(1).to(tl.int64)
    before = tl.load(before_ptr + token).to(tl.int64)
    after = tl.load(after_ptr + token).to(tl.int64)
    if after < 0:  # it pads
        tl.store(out_ptr + (token * HEADS + head) * ROWS + row, 0.0, there)
        return
    places = (head * ROWS + row)[:, None] * COLUMNS + column[None, :]
    whole = there[:, None] & inside[None, :]
    state = tl.load(state_ptr + before * state_stride + places, whole & (before >= 0), other=0.0)
    x = tl.load(x_ptr + token * x_stride + head * ROWS + row, there, other=0.0).to(tl.float32)
    group = head // SHARING * COLUMNS + column
    b = tl.load(b_ptr + token * b_stride + group, inside, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + token * c_stride + group, inside, other=0.0).to(tl.float32)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    step = time_steps(tl.load(dt_ptr + token * dt_stride + head), bias, low, high)
    decay = tl.exp(step * tl.load(a_ptr + head).to(tl.float32))
    now = decay * state.to(tl.float32) + (step * x)[:, None] * b[None, :]
    tl.store(state_ptr + after * state_stride + places, now.to(state_ptr.dtype.element_ty), whole)
    out = tl.sum(now * c[None, :], 1)
    if d_ptr is not None:
        out += tl.load(d_ptr + head).to(tl.float32) * x
    tl.store(out_ptr + (token * HEADS + head) * ROWS + row, out, there)
