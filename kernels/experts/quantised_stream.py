"""Experts of many tokens for Hopper, by weights in few bits that the copy engine brings ahead.

In Gluon, Triton's lower level. Tokens are put in the order of experts first, so that a tile of them stands
together, and multiplied as `quantised.stream` does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.experts.gating import gated
from quire.kernels.experts.grouped import combine
from quire.kernels.experts.groups import group
from quire.kernels.experts.quantised import QuantisedExperts
from quire.kernels.experts.quantised_tiles import tile_of
from quire.kernels.gpu import Gpu
from quire.kernels.launch import dependent_launch
from quire.kernels.linear import hopper_stream
from quire.kernels.linear.hopper_stream import ask_for_weights
from quire.kernels.quantised.stream import WARPS, ask_for_tokens, multiply_lines
from quire.kernels.quantised.weight import LINE, QuantisedWeight, WeightFormat

SHARED, MOST_SHARED = 40 * 1024, 108 * 1024  # bytes of stages: five programs on a multiprocessor, or two
STAGES = 3  # at least, if there is room
ROWS = 64  # outputs of a program
COPIED = 1024  # columns that a program puts in order


@triton.jit
def _order_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token = (tl.load(pairs_ptr + row) // TOP).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    values = tl.load(x_ptr + token * COLUMNS + column, inside)
    tl.store(out_ptr + row * COLUMNS + column, values, inside)


@gluon.jit(do_not_specialize=["alpha", "limit"])
def _kernel(
    out: gl.tensor, x_source: tma.tensor_descriptor, w_source: tma.tensor_descriptor, pairs: gl.tensor,
    counts: gl.tensor, shares: gl.tensor, scales: gl.tensor, zeros: gl.tensor, bias: gl.tensor,
    alpha: gl.tensor, limit: gl.tensor,
    EXPERTS: gl.constexpr, PADDED: gl.constexpr, OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, FORM: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, TOGETHER: gl.constexpr,
) -> None:  # fmt: skip
    """Multiply a tile of an expert's tokens by ROWS of its rows; with ACTIVATION by half of gate and up each.

    Without, results are times shares, and stand in the order of pairs.
    """
    WARPS: gl.constexpr = gl.num_warps()
    GATED: gl.constexpr = ACTIVATION is not None
    BYTES: gl.constexpr = 128 if FORM == "float8" else 64  # of a row, in a line
    LINES: gl.constexpr = (COLUMNS + 127) // 128
    OF_EXPERT: gl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    ALL_ROWS: gl.constexpr = EXPERTS * OF_EXPERT
    OUT_ROWS: gl.constexpr = ROWS // 2 if GATED else ROWS
    PLACES: gl.constexpr = (OUTPUTS + OUT_ROWS - 1) // OUT_ROWS
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    OF_THREAD: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    BEYOND: gl.constexpr = [[64, 0]] if ROWS == 128 else []
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        OF_THREAD + BEYOND, [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 64]
    )
    ASKED: gl.constexpr = TOKENS * 256 + ROWS * BYTES  # bytes of a stage
    gdc_launch_dependents()
    gdc_wait()
    # Tiles that follow each other have the same weights, and run at the same time.
    program = gl.program_id(0)
    within = program % (TOGETHER * PLACES)
    tile = program // (TOGETHER * PLACES) * TOGETHER + within % TOGETHER
    first_row = within // TOGETHER * OUT_ROWS
    expert, first, size = tile_of(counts, tile, EXPERTS, PADDED, TOKENS)
    if size <= 0:
        return
    of_expert = expert * OF_EXPERT

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
        mbarrier.expect(full.index(stage), ASKED, pred=stage < LINES)
        ask_for_weights(
            w_source, w_tiles.index(stage), full.index(stage), of_expert + first_row, OUTPUTS, stage * BYTES,
            stage < LINES, GATED, ROWS,
        )  # fmt: skip
        ask_for_tokens(x_source, x_tiles, full.index(stage), stage, first, stage * 128, stage < LINES)
    s_row = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    z_row = gl.arange(0, ROWS, gl.SliceLayout(1, CODES))
    if GATED:
        s_row = gl.where(s_row < OUT_ROWS, s_row, s_row + (OUTPUTS - OUT_ROWS))
        z_row = gl.where(z_row < OUT_ROWS, z_row, z_row + (OUTPUTS - OUT_ROWS))
    # Rows past the last one of all are read for nothing, as the last one.
    s_row = gl.minimum(of_expert + first_row + s_row, ALL_ROWS - 1)
    z_row = gl.minimum(of_expert + first_row + z_row, ALL_ROWS - 1)
    if scales is None:
        scale = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SUMS))
    else:
        scale = gl.load(scales + s_row)
    if zeros is not None:
        zero = gl.load(zeros + z_row)
    else:
        zero = gl.full([ROWS], 8, gl.uint8, gl.SliceLayout(1, CODES))
    acc = multiply_lines(
        x_source, w_source, x_tiles, w_tiles, full, scales, zeros, scale, zero, s_row, z_row, first,
        of_expert + first_row, OUTPUTS, 0, LINES, ALL_ROWS, GROUP, COLUMNS, FORM, GATED, SUMS, CODES,
    )  # fmt: skip

    if bias is not None:
        acc += gl.load(bias + s_row).to(gl.float32)[:, None]
    result = acc.permute((1, 0))
    if GATED:
        gate, up = gl.split(result.reshape([TOKENS, 2, OUT_ROWS]).permute((0, 2, 1)))
        result = gated(gate, up, alpha, limit, ACTIVATION)
    # A token's results next to each other, to be written 16 bytes at a time.
    LINE_OF: gl.constexpr = min(OUT_ROWS // 8, 32)
    WRITTEN: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LINE_OF, LINE_OF], [WARPS, 1], [1, 0])
    row = first_row + gl.arange(0, OUT_ROWS, gl.SliceLayout(0, WRITTEN))
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, WRITTEN))
    target = first + gl.minimum(token, size - 1)
    result = gl.convert_layout(result, WRITTEN)
    if not GATED:
        target = gl.load(pairs + target)
        result *= gl.load(shares + target).to(gl.float32)[:, None]
    place = target.to(gl.int64) * OUTPUTS
    inside = (token < size)[:, None] & (row < OUTPUTS)[None, :]
    gl.store(out + place[:, None] + row[None, :], result.to(dtype), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's tokens and rows of the weight; together: tiles of tokens that run beside each other."""

    tokens: int
    rows: int
    stages: int
    together: int

    def programs(self, pairs: int, experts: int, outputs: int, *, gates: bool) -> int:
        """Return how many programs there are, whichever experts are asked."""
        tiles = min(experts, pairs) + pairs // self.tokens
        places = triton.cdiv(outputs, self.rows // 2 if gates else self.rows)
        return triton.cdiv(tiles, self.together) * self.together * places


def tiling(form: WeightFormat, pairs: int, experts: int, *, gates: bool) -> Tiling:
    """Return how the tokens of pairs with so many experts are divided."""
    scaled = form.codes != "float4"  # sums of a group have registers of their own
    mean = pairs / experts
    tokens = min(max(triton.next_power_of_2(math.ceil(mean * 1.25)), 8), 64 if gates and scaled else 128)
    rows = 2 * ROWS if gates else ROWS
    size = tokens * LINE * 2 + rows * (LINE if form.codes == "float8" else LINE // 2)
    stages = max(SHARED // size, min(STAGES, MOST_SHARED // size))
    return Tiling(tokens, rows, stages, 1 if tokens < 64 else 8)


def suits(experts: QuantisedExperts, gpu: Gpu, dtype: torch.dtype) -> bool:
    """Tell whether tokens of a dtype and these weights are what `streamed_quantised_experts` takes."""
    forms = (experts.gate_up.format, experts.down.format)
    whole = all(form.codes == "float4" or form.group % LINE == 0 for form in forms)
    aligned = experts.hidden % 8 == 0 and experts.inner % 8 == 0
    return whole and aligned and hopper_stream.supports(gpu, dtype)


def streamed_quantised_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    experts: QuantisedExperts,
    tilings: tuple[Tiling, Tiling] | None = None,
) -> Tensor:
    """Compute as `experts.experts` does. tilings: of gate and up, and of down."""
    (tokens, top), size = index.shape, index.numel()
    of_up, of_down = tilings or (
        tiling(experts.gate_up.format, size, experts.count, gates=True),
        tiling(experts.down.format, size, experts.count, gates=False),
    )
    pairs, counts = group(index, experts.count)
    ordered = torch.empty(size, experts.hidden, dtype=x.dtype, device=x.device)
    assert x.is_contiguous()
    _order_kernel[size, triton.cdiv(experts.hidden, COPIED)](
        ordered, x, pairs, COLUMNS=experts.hidden, TOP=top, BLOCK=COPIED, num_warps=4,
        **dependent_launch(x.device),
    )  # fmt: skip
    inner = torch.empty(size, experts.inner, dtype=x.dtype, device=x.device)
    of_pairs = (pairs, counts, weights)
    _launch(inner, ordered, *of_pairs, experts.gate_up, experts.gate_up_bias, experts, of_up, gates=True)
    parts = torch.empty(size, experts.hidden, dtype=x.dtype, device=x.device)
    _launch(parts, inner, *of_pairs, experts.down, experts.down_bias, experts, of_down, gates=False)
    return combine(parts, tokens, top)


def _launch(
    out: Tensor,
    x: Tensor,
    pairs: Tensor,
    counts: Tensor,
    shares: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    experts: QuantisedExperts,
    tiles: Tiling,
    *,
    gates: bool,
) -> None:
    (size, outputs), codes = out.shape, weight.codes
    line = LINE if weight.format.codes == "float8" else LINE // 2
    box = tiles.rows // 2 if gates else tiles.rows
    x_layout = gl.NVMMASharedLayout(128, 16, rank=2)
    w_layout = gl.NVMMASharedLayout(line, 8, rank=2)
    scales, beside = weight.of_sums, weight.of_codes
    _kernel[(tiles.programs(size, experts.count, outputs, gates=gates),)](
        out, TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [tiles.tokens, LINE // 2], x_layout),
        TensorDescriptor(codes, list(codes.shape), [codes.shape[1], 1], [box, line], w_layout),
        pairs, counts, shares, scales, beside, bias, experts.alpha, experts.limit,
        EXPERTS=experts.count, PADDED=triton.next_power_of_2(experts.count), OUTPUTS=outputs,
        COLUMNS=weight.inputs, GROUP=weight.columns_of_entry, FORM=weight.format.codes,
        TOKENS=tiles.tokens, ROWS=tiles.rows, STAGES=tiles.stages,
        ACTIVATION=experts.activation if gates else None, TOGETHER=tiles.together,
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
