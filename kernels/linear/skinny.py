"""Fused linear layers of a few tokens, on tensor cores.

In Gluon, Triton's lower level: each warp of a program takes a part of the columns and reads the weight from
global memory as the tensor cores want it, 16 bytes a thread, without a detour. As in `linear.gemv` the first
weights are asked for before the kernel ahead has ended.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gpu import Gpu
from quire.kernels.launch import dependent_launch
from quire.kernels.linear import hopper_stream
from quire.kernels.linear.linear import Matrix
from quire.kernels.tuning import Tuning

MOST_TOKENS = 16
ROWS = 16  # outputs of a program, each a row of the weight
WARPS = 8
CHUNK = 64  # columns that a warp multiplies at a time
AHEAD = 4  # chunks that a warp has asked for, of each weight and, once it is there, of x
AHEAD_ADDED = 6  # of the output and down projections, which have no norm and no second weight to hold


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("weight", "norm"))


@gluon.jit(do_not_specialize=["num_tokens"])
def _kernel(
    out: gl.tensor, x: gl.tensor, weight: gl.tensor, bias: gl.tensor, norm: gl.tensor, eps: gl.tensor,
    num_tokens: gl.tensor,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    CHUNK: gl.constexpr, AHEAD: gl.constexpr, GATED: gl.constexpr, ADDED: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS outputs of all tokens; with GATED, those of the gate and of the up projection.

    Each warp has its part of the columns, and its own product of them [ROWS, TOKENS].
    """
    WARPS: gl.constexpr = gl.num_warps()
    PART: gl.constexpr = COLUMNS // WARPS
    STEPS: gl.constexpr = PART // CHUNK
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    W: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)  # a thread has 8 columns in a row, 16 bytes
    X: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    first_row = gl.program_id(0) * ROWS
    w_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, W)))[:, None, None]
    w_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, W)))[None, :, None]
    w_column = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(1, W)))[None, None, :]
    w_place = weight + (w_row.to(gl.int64) * COLUMNS + w_warp * PART + w_column)
    up_place = w_place + OUTPUTS * COLUMNS
    x_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    x_column = x_warp * PART + gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    x_token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    x_place = x + gl.minimum(x_token, num_tokens - 1) * COLUMNS + x_column

    tiles: gl.tuple = ()
    up_tiles: gl.tuple = ()
    norms: gl.tuple = ()
    for step in gl.static_range(AHEAD):
        tiles += (gl.load(w_place + step * CHUNK),)
        if GATED:
            up_tiles += (gl.load(up_place + step * CHUNK),)
        if norm is not None:
            norms += (gl.load(norm + (x_column + step * CHUNK)),)
    RESULT: gl.constexpr = gl.SliceLayout(0, SUMS)
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, RESULT))[None, :]
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, RESULT))[:, None]
    place = out + (token * OUTPUTS + row)
    inside = (token < num_tokens) & (row < OUTPUTS)
    if DEPENDENT:
        if not GATED:
            gdc_launch_dependents()
        gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
        if GATED:  # sooner, the next weights would take the memory's time from these, the most of a layer
            gdc_launch_dependents()
    chunks: gl.tuple = ()  # of x, asked for at once: many answers take no longer than one
    for step in gl.static_range(AHEAD):
        chunks += (gl.load(x_place + step * CHUNK),)
    if ADDED:
        before = gl.load(place, mask=inside, other=0.0)
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
    up_acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
    squares = gl.zeros([WARPS, TOKENS], gl.float32, gl.SliceLayout(1, X))
    for step in gl.static_range(STEPS):
        values = chunks[step]
        if norm is not None:
            exact = values.to(gl.float32)
            squares += gl.sum(exact * exact, 1)
            values *= norms[step]
        acc = mma_v2(tiles[step], values, acc)
        if GATED:
            up_acc = mma_v2(up_tiles[step], values, up_acc)
        if step + AHEAD < STEPS:
            tiles += (gl.load(w_place + (step + AHEAD) * CHUNK),)
            if GATED:
                up_tiles += (gl.load(up_place + (step + AHEAD) * CHUNK),)
            if norm is not None:
                norms += (gl.load(norm + (x_column + (step + AHEAD) * CHUNK)),)
            chunks += (gl.load(x_place + (step + AHEAD) * CHUNK),)

    dtype: gl.constexpr = out.dtype.element_ty
    result = gl.sum(acc, 0)
    up = gl.sum(up_acc, 0)
    if norm is not None:
        scale = gl.rsqrt(gl.sum(squares, 0) / COLUMNS + eps)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, RESULT))[None, :]
        result *= scale
        up *= scale
    if bias is not None:
        result += gl.load(bias + row).to(gl.float32)
        if GATED:
            up += gl.load(bias + OUTPUTS + row).to(gl.float32)
    result = result.to(dtype)
    if GATED:  # rounded where the unfused layers round
        gate = result.to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        result = (silu * up.to(dtype).to(gl.float32)).to(dtype)
    if ADDED:
        result = (before.to(gl.float32) + result.to(gl.float32)).to(dtype)
    gl.store(place, result, mask=inside)


def supports(gpu: Gpu, dtype: torch.dtype, tokens: int, weight: Matrix, *, gated: bool) -> bool:
    """Tell whether `linear_of_few` takes so many tokens of dtype and a weight, of a gate and an up if gated.

    What is multiplied by the norm's weight is scaled only afterwards, and fp16 may not hold it.
    """
    return (
        gpu.has_kernels
        and dtype == torch.bfloat16
        and tokens <= MOST_TOKENS
        and weight.inputs % (WARPS * CHUNK) == 0
        and weight.outputs % (2 * ROWS if gated else ROWS) == 0
    )


def most_tokens(gpu: Gpu, dtype: torch.dtype, columns: int, tuning: Tuning) -> int:
    """Return up to how many tokens of dtype and so many columns are quicker here than elsewhere.

    Biased output projections, which `linear.hopper_stream` does not take, are too rare to ask for.
    """
    if hopper_stream.supports(gpu, dtype):
        return tuning.streamed_tokens if columns <= tuning.streamed_columns else 1
    return MOST_TOKENS if columns <= tuning.fused_columns else 1


def prefers_one(weight: Matrix, tuning: Tuning) -> bool:
    """Tell whether even one token is quicker here than by `linear.gemv`."""
    return weight.outputs % (2 * ROWS) == 0 and weight.elements <= tuning.skinny_weights_of_one


def chunks_ahead(columns: int, warps: int, *, added: bool) -> int:
    """Return AHEAD of a kernel in which each of `warps` takes its part of the columns."""
    return min(AHEAD_ADDED if added else AHEAD, columns // (warps * CHUNK))


def linear_of_few(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    *,
    gated: bool,
    added: bool,
) -> None:
    """Compute out [T, N] of x [T, K], T up to MOST_TOKENS.

    x is normalised first by `norm` [K], unless that is None. `gated`: weight [2N, K] is a fused gate and up
    projection, and `out` is silu(gate) · up. `added`: the result is added to what `out` holds.
    """
    (tokens, columns), outputs = x.shape, out.shape[1]
    warps = WARPS if norm is None else WARPS // 2  # fewer: each reads its part of x and of the norm
    if tokens > MOST_TOKENS or columns % (warps * CHUNK) or outputs % ROWS or not weight.is_contiguous():
        raise ValueError(
            f"this is for up to {MOST_TOKENS} tokens of a multiple of {warps * CHUNK} columns, a multiple of "
            f"{ROWS} outputs and a contiguous weight; got {tokens} tokens, {columns} columns, {outputs} "
            f"outputs and strides {weight.stride()}"
        )
    _kernel[(outputs // ROWS,)](
        out, x, weight, bias, norm, eps, tokens,
        OUTPUTS=outputs, COLUMNS=columns, TOKENS=8 if tokens <= 8 else 16, ROWS=ROWS, CHUNK=CHUNK,
        AHEAD=chunks_ahead(columns, warps, added=added), GATED=gated, ADDED=added, num_warps=warps,
        **dependent_launch(x.device),
    )  # fmt: skip
