"""Linear layers of up to a few hundred tokens for Hopper, by weights in few bits that are asked for ahead.

In Gluon, Triton's lower level. As in `linear.hopper_stream` a program fills stages of shared memory by the
copy engine (TMA), codes before the kernel ahead has ended. Here codes become the tensor cores' first operand
in registers, and tokens are always the second one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.linear.hopper_stream import ask_for_weights, gated_halves
from quire.kernels.quantised.decode import floats_of, fours_of, integers_of
from quire.kernels.quantised.weight import LINE, QuantisedWeight, WeightFormat

MOST_TOKENS = 256
SHARED = 108 * 1024  # bytes of stages, as many as leave room for two programs on a multiprocessor
FULL = 132  # programs: about one on every multiprocessor
MOST_SPLITS, MOST_STAGES = 4, 12
WARPS = 4
ROWS = 64  # outputs of a program
_HALF = gl.constexpr(64)  # columns that are multiplied at a time

# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("w_source", "scales", "zeros"))


@gluon.jit
def ask_for_tokens(
    source: tma.tensor_descriptor, tiles: gl.shared_memory_descriptor, full: gl.shared_memory_descriptor,
    stage: gl.tensor, token: gl.tensor, column: gl.tensor, needed: gl.tensor,
) -> None:  # fmt: skip
    first, second = tiles.index(2 * stage), tiles.index(2 * stage + 1)
    tma.async_copy_global_to_shared(source, [token, column], full, first, pred=needed)
    tma.async_copy_global_to_shared(source, [token, column + _HALF], full, second, pred=needed)


@gluon.jit
def of_line(
    numbers: gl.tensor, line: gl.tensor, last: gl.tensor, row: gl.tensor, ALL_ROWS: gl.constexpr,
    GROUP: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Return what rows have for the group of a line [rows], or of the last one."""
    return gl.load(numbers + (gl.minimum(line, last) * 128 // GROUP * ALL_ROWS + row))


@gluon.jit
def multiply_lines(
    x_source: tma.tensor_descriptor, w_source: tma.tensor_descriptor,
    x_tiles: gl.shared_memory_descriptor, w_tiles: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor, scales: gl.tensor, zeros: gl.tensor, scale: gl.tensor,
    zero: gl.tensor, s_row: gl.tensor, z_row: gl.tensor, first_token: gl.tensor, first_row: gl.tensor,
    up_rows: gl.tensor, first_line: gl.tensor, lines: gl.tensor, ALL_ROWS: gl.constexpr,
    GROUP: gl.constexpr, COLUMNS: gl.constexpr, FORM: gl.constexpr, GATED: gl.constexpr,
    SUMS: gl.constexpr, CODES: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Multiply lines of rows by tokens -> [rows, tokens], times scales; the first stages are asked for.

    scale, zero: what rows have for the first line. Of 4-bit floats `scales` is None, and `zeros` has
    exponents, see `decode.fours_of`.
    """
    STAGES: gl.constexpr = w_tiles.shape[0]
    ROWS: gl.constexpr = w_tiles.shape[1]
    BYTES: gl.constexpr = w_tiles.shape[2]
    TOKENS: gl.constexpr = x_tiles.shape[1]
    ASKED: gl.constexpr = TOKENS * 256 + ROWS * BYTES  # bytes of a stage
    W: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    GROUPED: gl.constexpr = scales is not None and GROUP < COLUMNS
    dtype: gl.constexpr = x_source.dtype
    last = first_line + lines - 1
    acc = gl.zeros([ROWS, TOKENS], gl.float32, SUMS)
    for step in range(lines):
        now = step % STAGES
        mbarrier.wait(full.index(now), step // STAGES & 1)
        codes = w_tiles.index(now)
        if FORM == "float8":
            first = floats_of(codes.slice(0, 64, dim=1).load(CODES), dtype)
            second = floats_of(codes.slice(64, 64, dim=1).load(CODES), dtype)
        elif FORM == "float4":
            first, second = fours_of(codes.load(CODES), zero[:, None], CODES)
        else:
            first, second = integers_of(codes.load(CODES), zero[:, None], dtype)
        first = gl.convert_layout(first, W)
        second = gl.convert_layout(second, W)
        # What the next line needs is asked for ahead.
        line = first_line + step + 1
        next_scale = of_line(scales, line, last, s_row, ALL_ROWS, GROUP) if GROUPED else scale
        if (GROUPED or FORM == "float4") and zeros is not None:
            zero = of_line(zeros, line, last, z_row, ALL_ROWS, GROUP)
        part = gl.zeros([ROWS, TOKENS], gl.float32, SUMS) if GROUPED else acc
        part = warpgroup_mma(first, x_tiles.index(2 * now).permute((1, 0)), part, is_async=True)
        part = warpgroup_mma(second, x_tiles.index(2 * now + 1).permute((1, 0)), part, is_async=True)
        # The line before this one is done with: its stage is filled again.
        ahead = step - 1 + STAGES
        free = ahead % STAGES
        needed = (step > 0) & (ahead < lines)
        mbarrier.expect(full.index(free), ASKED, pred=needed)
        ask_for_tokens(
            x_source, x_tiles, full.index(free), free, first_token, (first_line + ahead) * 128, needed
        )
        ask_for_weights(
            w_source, w_tiles.index(free), full.index(free), first_row, up_rows, (first_line + ahead) * BYTES,
            needed, GATED, ROWS,
        )  # fmt: skip
        # Codes of the next line must not take the registers of these before they are multiplied.
        sums, _, _ = warpgroup_mma_wait(0, deps=(part, first, second))
        acc = acc + sums * scale.to(gl.float32)[:, None] if GROUPED else sums
        scale = next_scale

    if not GROUPED and scales is not None:
        acc *= scale.to(gl.float32)[:, None]
    return acc


@gluon.jit(do_not_specialize=["num_tokens", "splits"])
def _kernel(
    out: gl.tensor, x_source: tma.tensor_descriptor, w_source: tma.tensor_descriptor, scales: gl.tensor,
    zeros: gl.tensor, bias: gl.tensor, num_tokens: gl.tensor, splits: gl.tensor,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
) -> None:  # fmt: skip
    """Multiply TOKENS tokens by ROWS rows of the weight; an `out` in fp32 is of parts of the sums."""
    WARPS: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = 128 if FORM == "float8" else 64  # of a row, in a line
    LINES: gl.constexpr = COLUMNS // 128
    ALL_ROWS: gl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    OUT_ROWS: gl.constexpr = ROWS // 2 if GATED else ROWS
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    OF_THREAD: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    # Of a gate a thread's further row is of its up projection.
    BEYOND: gl.constexpr = [[64, 0]] if GATED else []
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        OF_THREAD + BEYOND, [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 64]
    )
    ASKED: gl.constexpr = TOKENS * 256 + ROWS * BYTES  # bytes of a stage
    first_token = gl.program_id(0) * TOKENS  # who reads the same weights runs at the same time
    first_row = gl.program_id(1) * OUT_ROWS
    split = gl.program_id(2)
    first_line = split * LINES // splits
    lines = (split + 1) * LINES // splits - first_line

    dtype: gl.constexpr = x_source.dtype
    x_tiles = gl.allocate_shared_memory(
        dtype, [2 * STAGES, TOKENS, 64], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    w_tiles = gl.allocate_shared_memory(
        gl.uint8, [STAGES, ROWS, BYTES], gl.NVMMASharedLayout(BYTES, 8, rank=2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        mbarrier.expect(full.index(stage), ASKED, pred=stage < lines)
        ask_for_weights(
            w_source, w_tiles.index(stage), full.index(stage), first_row, OUTPUTS,
            (first_line + stage) * BYTES, stage < lines, GATED, ROWS,
        )  # fmt: skip
    s_row = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    z_row = gl.arange(0, ROWS, gl.SliceLayout(1, CODES))
    if GATED:
        s_row = gl.where(s_row < OUT_ROWS, s_row, s_row + (OUTPUTS - OUT_ROWS))
        z_row = gl.where(z_row < OUT_ROWS, z_row, z_row + (OUTPUTS - OUT_ROWS))
    s_row += first_row
    z_row += first_row
    last = first_line + lines - 1
    scale = of_line(scales, first_line, last, s_row, ALL_ROWS, GROUP)
    if zeros is None:
        zero = gl.full([ROWS], 8, gl.uint8, gl.SliceLayout(1, CODES))
    else:
        zero = of_line(zeros, first_line, last, z_row, ALL_ROWS, GROUP)
    gdc_launch_dependents()
    gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
    for stage in gl.static_range(STAGES):
        column = (first_line + stage) * 128
        ask_for_tokens(x_source, x_tiles, full.index(stage), stage, first_token, column, stage < lines)

    acc = multiply_lines(
        x_source, w_source, x_tiles, w_tiles, full, scales, zeros, scale, zero, s_row, z_row, first_token,
        first_row, OUTPUTS, first_line, lines, ALL_ROWS, GROUP, COLUMNS, FORM, GATED, SUMS, CODES,
    )  # fmt: skip
    PARTS: gl.constexpr = out.dtype.element_ty == gl.float32
    if bias is not None:
        acc += gl.load(bias + s_row).to(gl.float32)[:, None]
    result = acc.permute((1, 0))
    if GATED:
        result = gated_halves(result, dtype, "silu")
    elif not PARTS:
        result = result.to(dtype)
    # A token's results next to each other, to be written 16 bytes at a time.
    HELD: gl.constexpr = 4 if PARTS else 8
    LINE_OF: gl.constexpr = min(OUT_ROWS // HELD, 32)
    WRITTEN: gl.constexpr = gl.BlockedLayout([1, HELD], [32 // LINE_OF, LINE_OF], [WARPS, 1], [1, 0])
    row = first_row + gl.arange(0, OUT_ROWS, gl.SliceLayout(0, WRITTEN))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, WRITTEN))
    place = (split * num_tokens + token).to(gl.int64) * OUTPUTS
    result = gl.convert_layout(result, WRITTEN)
    gl.store(out + place[:, None] + row[None, :], result, mask=(token < num_tokens)[:, None])


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's tokens and rows of the weight; `stages` lines are in shared memory at a time.

    splits: programs that share a sum.
    """

    tokens: int
    rows: int
    stages: int
    splits: int


def tiling(
    form: WeightFormat, count: int, outputs: int, columns: int, *, gated: bool, divided: bool
) -> Tiling | None:
    """Return how `count` tokens and a weight are divided; None where it is expanded instead.

    gated: `outputs` of a gate and as many of an up projection. divided: sums may be of parts.
    """
    if not 1 <= count <= MOST_TOKENS or (form.group and form.group % LINE) or outputs % ROWS:
        return None
    rows = 2 * ROWS if gated else ROWS
    tokens = min(max(triton.next_power_of_2(count), 8), 64 if gated else 128)
    programs = outputs // ROWS * triton.cdiv(count, tokens)
    splits = min(max(2 * FULL // programs, 1), MOST_SPLITS, columns // LINE) if divided else 1
    shared = SHARED if programs * splits > FULL else 2 * SHARED
    size = tokens * LINE * 2 + rows * (LINE if form.codes == "float8" else LINE // 2)
    return Tiling(tokens, rows, min(shared // size, MOST_STAGES), splits)


def stream_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, tiles: Tiling) -> Tensor:
    """Multiply x [T, K] by a weight [N, K], plus bias [N] or None -> [T, N]."""
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(out, x, weight, bias, tiles, gated=False)
    return out


def stream_gated_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, tiles: Tiling) -> Tensor:
    """Multiply x [T, K] by a gate and an up projection, weight [2I, K] -> silu(gate) · up [T, I]."""
    out = torch.empty(len(x), weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(out, x, weight, bias, tiles, gated=True)
    return out


def stream_linear_parts(x: Tensor, weight: QuantisedWeight, tiles: Tiling) -> Tensor:
    """Multiply x [T, K] by a weight [N, K] -> fp32 [splits, T, N], sums over a part of the columns each."""
    out = torch.empty(tiles.splits, len(x), weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(out, x, weight, None, tiles, gated=False)
    return out


def _launch(
    out: Tensor, x: Tensor, weight: QuantisedWeight, bias: Tensor | None, tiles: Tiling, *, gated: bool
) -> None:
    assert x.is_contiguous()  # as the copy engine is told
    (count, columns), outputs = x.shape, out.shape[-1]
    of_line = LINE if weight.format.codes == "float8" else LINE // 2
    box = tiles.rows // 2 if gated else tiles.rows
    x_layout = gl.NVMMASharedLayout(128, 16, rank=2)
    w_layout = gl.NVMMASharedLayout(of_line, 8, rank=2)
    codes = weight.codes
    x_source = TensorDescriptor(x, list(x.shape), [columns, 1], [tiles.tokens, _HALF.value], x_layout)
    w_source = TensorDescriptor(codes, list(codes.shape), [codes.shape[1], 1], [box, of_line], w_layout)
    _kernel[triton.cdiv(count, tiles.tokens), outputs // box, tiles.splits](
        out, x_source, w_source, weight.scales, weight.zeros, bias, count, tiles.splits,
        OUTPUTS=outputs, COLUMNS=columns, GROUP=weight.format.group or columns, FORM=weight.format.codes,
        TOKENS=tiles.tokens, ROWS=tiles.rows, STAGES=tiles.stages, GATED=gated,
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
