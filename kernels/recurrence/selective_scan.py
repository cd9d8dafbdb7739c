"""Mamba's scan (Gu and Dao 2023, section 3.2): each channel's state decays and gets what its token adds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from quire.kernels.launch import dependent_launch
from quire.kernels.recurrence.selective_scan_kernels import (
    DECODE_WARPS,
    SLICE,
    WARPS,
    chunk_kernel,
    chunk_tile,
    decode_kernel,
    decode_tile,
)
from quire.kernels.recurrence.step import CARRIED, NO_STATE, StateStep

MOST_COLUMNS = 256  # of a channel's state


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    state: Tensor,
    step: StateStep,
) -> Tensor:
    """Scan a step's tokens x [T, E] -> [T, E], and leave the states where the step says.

    A channel's state s [N] becomes exp(d A) s + d x B, and its output s C + D x, times SiLU(z); d is dt +
    delta_bias and, if `delta_softplus`, softplus of that. dt and z [T, E], A [E, N], B and C [T, N], D and
    delta_bias [E]; state [blocks, E, N] in fp32, in which all is computed. Tokens of no decode and no chunk
    get no output: what is there is undefined. Raise ValueError if shapes or dtypes do not fit together.
    """
    _check(x, dt, A, B, C, D, z, delta_bias, state)
    x, dt, B, C = _dense(x), _dense(dt), _dense(B), _dense(C)
    z = None if z is None else _dense(z)
    A = A.contiguous()
    channels, columns = state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tensors = x, dt, A, B, C, D, z, delta_bias, state, out
    strides = tuple(each.stride(0) for each in (x, dt, B, C, x if z is None else z, state))
    sizes = {"CHANNELS": channels, "COLUMNS": columns, "SOFTPLUS": delta_softplus}
    if step.decodes:
        tile = decode_tile(columns)
        decode_kernel[(triton.cdiv(channels, tile["SLICE"]), step.decodes)](
            *tensors, step.before, step.after, *strides, **sizes, **tile, num_warps=DECODE_WARPS,
            **dependent_launch(x.device),
        )  # fmt: skip
    if len(step.chunks):
        chunk_kernel[(triton.cdiv(channels, SLICE),)](
            *tensors, step.chunks, step.last_used, *strides, **sizes, **chunk_tile(columns),
            num_warps=WARPS,
        )  # fmt: skip
    return out


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    state: Tensor,
    step: StateStep,
) -> Tensor:
    """Do the same as `selective_scan` in plain torch, token by token; what is undefined there is 0 here."""
    _check(x, dt, A, B, C, D, z, delta_bias, state)
    x, dt, B, C = (each.contiguous() for each in (x, dt, B, C))  # strides change torch's last bits
    z = None if z is None else z.contiguous()
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float()
    steps = F.softplus(steps) if delta_softplus else steps
    now = nothing = torch.zeros(state.shape[1:], dtype=torch.float32, device=state.device)
    for first, tokens, before, after in step.in_order():
        if before != CARRIED:
            now = nothing if before == NO_STATE else state[before]
        for token in range(first, first + tokens):
            taken, own = steps[token, :, None], x[token].float()
            now = torch.exp(taken * A.float()) * now + taken * own[:, None] * B[token].float()
            seen = now @ C[token].float()
            seen = seen if D is None else seen + D.float() * own
            out[token] = (seen if z is None else seen * F.silu(z[token].float())).to(x.dtype)
        if after >= 0:
            state[after] = now
    return out


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: Tensor,
) -> None:
    channels, columns = A.shape
    tokens = (len(x), channels)
    wide = [each.shape == tokens for each in (x, dt, z) if each is not None]
    narrow = B.shape == C.shape == (len(x), columns)
    if not all(wide) or not narrow or state.shape[1:] != A.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, dt {tuple(dt.shape)}, A {tuple(A.shape)}, B {tuple(B.shape)}, "
            f"C {tuple(C.shape)}, z {None if z is None else tuple(z.shape)} and states {tuple(state.shape)} "
            "do not fit: expected [T, E] of x, dt and z, [E, N], [T, N] twice, and [blocks, E, N]"
        )
    for name, each in (("D", D), ("delta_bias", delta_bias)):
        if each is not None and each.shape != (channels,):
            raise ValueError(f"{name} {tuple(each.shape)}: expected [{channels}], one number of each channel")
    if columns > MOST_COLUMNS:
        raise ValueError(f"a channel's state has {columns} numbers, and kernels take up to {MOST_COLUMNS}")
    if state.dtype != torch.float32:
        raise ValueError(f"states are in {state.dtype}: expected float32")
    if len(state) and not state[0].is_contiguous():
        raise ValueError(f"a block's states have strides {state.stride()[1:]}: expected them contiguous")


def _dense(tokens: Tensor) -> Tensor:
    """Return the tensor [T, width] with each token's numbers next to each other."""
    return tokens if tokens.stride(1) == 1 else tokens.contiguous()
