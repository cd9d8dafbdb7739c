"""Experts by weights in few bits: a program has rows of an expert's weights, and one token or a few.

In Gluon, Triton's lower level. As in `quantised.few` warps take lines in turn, and read codes from global
memory as the tensor cores want them.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.experts.gating import gated
from quire.kernels.experts.grouped import combine
from quire.kernels.experts.groups import Groups, group
from quire.kernels.experts.quantised import QuantisedExperts
from quire.kernels.experts.quantised_tiles import tile_of
from quire.kernels.launch import dependent_launch
from quire.kernels.quantised.few import lines_ahead, tokens_ahead
from quire.kernels.quantised.lines import ask_for_line, multiply_by_warps
from quire.kernels.quantised.weight import QuantisedWeight

ROWS = 16  # outputs of a program, each a row of the weight
AT_ONCE = 396  # programs of eight warps, by the largest GPUs
ALONE, TOGETHER = 8, 16  # tokens of a program: of which one is used, and most that share an expert


@gluon.jit(do_not_specialize=["alpha", "limit"])
def _kernel(
    out: gl.tensor, x: gl.tensor, index: gl.tensor, counts: gl.tensor, shares: gl.tensor, codes: gl.tensor,
    scales: gl.tensor, zeros: gl.tensor, bias: gl.tensor, alpha: gl.tensor, limit: gl.tensor,
    TOP: gl.constexpr, EXPERTS: gl.constexpr, PADDED: gl.constexpr, OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr, GROUP: gl.constexpr, FORM: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    AHEAD: gl.constexpr, X_AHEAD: gl.constexpr, ACTIVATION: gl.constexpr, DEPENDENT: gl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS outputs of the tokens of a tile; with ACTIVATION those of gate and up, else of down.

    index: experts [pairs], of which a tile has one; with `counts` the pairs in the order of experts. Inputs
    of down, and outputs of up, stand in that order, too.
    """
    WARPS: gl.constexpr = gl.num_warps()
    GATED: gl.constexpr = ACTIVATION is not None
    LINES: gl.constexpr = (COLUMNS + 127) // 128
    STEPS: gl.constexpr = (LINES + WARPS - 1) // WARPS
    BYTES: gl.constexpr = 128 if FORM == "float8" else 64  # of a row, in a line
    OF_EXPERT: gl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    ALL_ROWS: gl.constexpr = EXPERTS * OF_EXPERT
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    X: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    OF_WARPS: gl.constexpr = [[1, 0, 0], [2, 0, 0], [4, 0, 0]] if WARPS == 8 else [[1, 0, 0], [2, 0, 0]]
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0]],
        [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        OF_WARPS, [], [WARPS, 16, 64],
    )  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # which experts are asked for is what an earlier kernel wrote
    if counts is None:
        first = gl.program_id(1)
        expert = gl.load(index + first).to(gl.int32)
        size = first * 0 + 1
    else:
        expert, first, size = tile_of(counts, gl.program_id(1), EXPERTS, PADDED, TOKENS)
    if size <= 0:
        return
    dtype: gl.constexpr = x.dtype.element_ty
    of_expert = expert * OF_EXPERT
    first_row = gl.program_id(0) * ROWS
    c_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    c_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :, None]
    c_row = of_expert + gl.minimum(c_row, OUTPUTS - 1)
    c_byte = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    LINE_BYTES: gl.constexpr = LINES * BYTES
    place = codes + (c_row.to(gl.int64) * LINE_BYTES + (c_warp * BYTES + c_byte))
    up_place = place + OUTPUTS * LINE_BYTES
    lines_left = LINES - c_warp

    tiles: gl.tuple = ()
    up_tiles: gl.tuple = ()
    for step in gl.static_range(min(AHEAD, STEPS)):
        tiles = ask_for_line(tiles, place, lines_left, step, LINES, WARPS, FORM)
        if GATED:
            up_tiles = ask_for_line(up_tiles, up_place, lines_left, step, LINES, WARPS, FORM)

    x_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    x_column = x_warp * 128 + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    x_token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    source = first + gl.minimum(x_token, size - 1)
    if GATED:
        source = (source if counts is None else gl.load(index + source).to(gl.int32)) // TOP
    x_place = x + source.to(gl.int64) * COLUMNS + x_column
    s_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
    s_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :]
    s_row = of_expert + gl.minimum(s_row, OUTPUTS - 1)
    z_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None]
    z_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :]
    z_row = of_expert + gl.minimum(z_row, OUTPUTS - 1)
    acc, up_acc, _ = multiply_by_warps(
        tiles, up_tiles, place, up_place, lines_left, x_place, x_column, None, scales, zeros, s_warp, s_row,
        z_warp, z_row, OUTPUTS, ALL_ROWS, COLUMNS, GROUP, FORM, AHEAD, X_AHEAD, GATED, SUMS, CODES,
    )  # fmt: skip

    RESULT: gl.constexpr = gl.SliceLayout(0, SUMS)
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, RESULT))[None, :]
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, RESULT))[:, None]
    inside = (token < size) & (row < OUTPUTS)
    of_row = of_expert + gl.minimum(row, OUTPUTS - 1)
    result = gl.sum(acc, 0)
    up = gl.sum(up_acc, 0)
    if scales is not None and GROUP >= COLUMNS:
        result *= gl.load(scales + of_row).to(gl.float32)
        if GATED:
            up *= gl.load(scales + OUTPUTS + of_row).to(gl.float32)
    if bias is not None:
        result += gl.load(bias + of_row).to(gl.float32)
        if GATED:
            up += gl.load(bias + OUTPUTS + of_row).to(gl.float32)
    target = first + gl.minimum(token, size - 1)
    if GATED:
        result = gated(result, up, alpha, limit, ACTIVATION)
    else:
        if counts is not None:
            target = gl.load(index + target).to(gl.int32)
        result *= gl.load(shares + target).to(gl.float32)
    gl.store(out + (target.to(gl.int64) * OUTPUTS + row), result.to(dtype), mask=inside)


def few_quantised_experts(x: Tensor, index: Tensor, weights: Tensor, experts: QuantisedExperts) -> Tensor:
    """Compute as `experts.experts` does, each pair of a token and an expert alone."""
    return _computed(x, index, weights, experts, None)


def tiled_quantised_experts(x: Tensor, index: Tensor, weights: Tensor, experts: QuantisedExperts) -> Tensor:
    """Compute as `experts.experts` does; pairs of an expert share what is read of it."""
    return _computed(x, index, weights, experts, group(index, experts.count))


def _computed(
    x: Tensor, index: Tensor, weights: Tensor, experts: QuantisedExperts, groups: Groups | None
) -> Tensor:
    (tokens, top), size = index.shape, index.numel()
    inner = torch.empty(size, experts.inner, dtype=x.dtype, device=x.device)
    _launch(inner, x, index, groups, weights, experts.gate_up, experts.gate_up_bias, experts, gates=True)
    parts = torch.empty(size, experts.hidden, dtype=x.dtype, device=x.device)
    _launch(parts, inner, index, groups, weights, experts.down, experts.down_bias, experts, gates=False)
    return combine(parts, tokens, top)


def _launch(
    out: Tensor,
    x: Tensor,
    index: Tensor,
    groups: Groups | None,
    shares: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    experts: QuantisedExperts,
    *,
    gates: bool,
) -> None:
    (size, outputs), columns, form = out.shape, weight.inputs, weight.format
    assert x.is_contiguous()
    assert shares.is_contiguous()
    tokens = ALONE if groups is None else TOGETHER
    programs = size if groups is None else min(experts.count, size) + size // tokens
    scales, beside = weight.of_sums, weight.of_codes
    of_rows = triton.cdiv(outputs, ROWS)
    _kernel[of_rows, programs](
        out, x, index if groups is None else groups.pairs, None if groups is None else groups.counts, shares,
        weight.codes, scales, beside, bias, experts.alpha, experts.limit,
        TOP=index.shape[1], EXPERTS=experts.count, PADDED=triton.next_power_of_2(experts.count),
        OUTPUTS=outputs, COLUMNS=columns, GROUP=weight.columns_of_entry, FORM=form.codes,
        TOKENS=tokens, ROWS=ROWS, AHEAD=lines_ahead(form, gated=gates), X_AHEAD=tokens_ahead(tokens),
        ACTIVATION=experts.activation if gates else None, num_warps=warps_of(of_rows * programs, gates=gates),
        **dependent_launch(x.device),
    )  # fmt: skip


def warps_of(programs: int, *, gates: bool) -> int:
    """Return how many warps share a program's lines: more where all programs run at once."""
    return 8 if gates and programs <= AT_ONCE else 4
