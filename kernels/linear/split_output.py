"""The output projection of a token whose attention was split, merging the splits on its way in.

In Gluon, Triton's lower level. A kernel that merges takes as long to begin and to end as the projection
itself, and was one of six in a layer: 23.8 against 18.3 µs of one token of Qwen3-0.6B on an H100. Here every
program merges for itself, which costs less as long as they and the splits are few.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.splits import SplitPartials, tiles_of_split
from quire.kernels.gpu import Gpu
from quire.kernels.launch import dependent_launch
from quire.kernels.linear.linear import Matrix
from quire.kernels.tuning import Tuning

MOST_SPLITS = 32  # of a row; with more their merging would take longer than fewer of them
ROWS = 8  # outputs of a program
HELD = gl.constexpr(8)  # columns of a thread
ROUND = 4  # splits that a program reads at a time


def supports(gpu: Gpu, dtype: torch.dtype, weight: Matrix, num_heads: int) -> bool:
    """Tell whether `add_split_output` takes a weight [N, Hq D] and a residual [T, N] of dtype."""
    head_dim = weight.inputs // num_heads
    warps = weight.inputs // (32 * HELD.value)
    return (
        gpu.has_kernels
        and weight.outputs % ROWS == 0
        and head_dim % HELD.value == 0
        and weight.inputs == warps * 32 * HELD.value
        and warps in (1, 2, 4, 8, 16)
        and dtype in (torch.bfloat16, torch.float16)
    )


def prefers(tokens: int, weight: Matrix, tuning: Tuning) -> bool:
    """Tell whether merging in each program of the projection is quicker than in a kernel of its own."""
    return tokens == 1 and weight.elements <= tuning.merging_weights


def add_split_output(residual: Tensor, weight: Tensor, bias: Tensor | None, partials: SplitPartials) -> None:
    """Add attention's result times weight [N, Hq D], plus bias [N] or None, to residual [T, N] in place.

    The result is what `attention.splits.merge_splits` would give. To a row without context nothing is added.
    Best of few splits: MOST_SPLITS.
    """
    _launch(residual, weight, bias, partials, added=True)


def split_output(weight: Tensor, bias: Tensor | None, partials: SplitPartials) -> Tensor:
    """Return what `add_split_output` adds [T, N]; anything of a row without context."""
    out = partials.out.new_empty(len(partials.out), len(weight))
    _launch(out, weight, bias, partials, added=False)
    return out


def _launch(
    residual: Tensor, weight: Tensor, bias: Tensor | None, partials: SplitPartials, *, added: bool
) -> None:
    (tokens, outputs), (heads, head_dim) = residual.shape, partials.out.shape[1:]
    _kernel[outputs // ROWS, tokens](
        residual, partials.workspace.partials, partials.workspace.lse, partials.context_lens, weight, bias,
        partials.window, partials.max_splits,
        HEADS=heads, HEAD_DIM=head_dim, TILE=partials.tile, ROWS=ROWS, ROUND=ROUND,
        SPARING=partials.sparing, ADDED=added,
        num_warps=heads * head_dim // (32 * HELD.value), **dependent_launch(residual.device),
    )  # fmt: skip


@gluon.jit
def _splits_of(
    context_len: gl.tensor,
    window: gl.tensor,
    max_splits: gl.tensor,
    TILE: gl.constexpr,
    SPARING: gl.constexpr,
) -> gl.tensor:
    """Divide a context as `attention.splits.tiles_and_splits`."""
    first_tile = gl.where(window > 0, gl.maximum(context_len - window, 0), 0) // TILE
    tiles = gl.cdiv(context_len, TILE) - first_tile
    return gl.cdiv(tiles, tiles_of_split(tiles, max_splits, SPARING))


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("weight", "context_lens"))


@gluon.jit(do_not_specialize=["window", "max_splits"])
def _kernel(
    residual: gl.tensor, partials: gl.tensor, lse: gl.tensor, context_lens: gl.tensor, weight: gl.tensor,
    bias: gl.tensor, window: gl.tensor, max_splits: gl.tensor,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, ROUND: gl.constexpr,
    SPARING: gl.constexpr, ADDED: gl.constexpr, DEPENDENT: gl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS outputs; the weights are asked for before the kernel ahead has ended.

    A thread has the same HELD columns of each row and of each split, so that nothing is exchanged on the way.
    """
    COLUMNS: gl.constexpr = HEADS * HEAD_DIM
    GROUPS: gl.constexpr = COLUMNS // HELD
    WARPS: gl.constexpr = gl.num_warps()
    WEIGHTS: gl.constexpr = gl.BlockedLayout([ROWS, 1, HELD], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
    VALUES: gl.constexpr = gl.BlockedLayout([ROUND, 1, HELD], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
    OUTPUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WEIGHTS))
    MERGED: gl.constexpr = gl.SliceLayout(0, VALUES)
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, VALUES))
    token = gl.program_id(1)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, OUTPUT)
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, WEIGHTS)))
    held = gl.arange(0, HELD, gl.SliceLayout(0, gl.SliceLayout(1, WEIGHTS)))
    column = group[None, :, None] * HELD + held[None, None, :]
    weights = gl.load(weight + row[:, None, None] * COLUMNS + column)
    splits = _splits_of(gl.load(context_lens + token), window, max_splits, TILE, SPARING)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
    if splits == 0:  # the context is empty
        return
    residual += token * gl.num_programs(0) * ROWS + row
    if ADDED:
        before = gl.load(residual)
    split = gl.arange(0, ROUND, gl.SliceLayout(1, gl.SliceLayout(2, VALUES)))
    group = gl.arange(0, GROUPS, GROUP)
    held = gl.arange(0, HELD, gl.SliceLayout(0, gl.SliceLayout(1, VALUES)))
    merged = gl.zeros([GROUPS, HELD], gl.float32, MERGED)
    peak = gl.full([GROUPS], float("-inf"), gl.float32, GROUP)
    total = gl.zeros([GROUPS], gl.float32, GROUP)
    for first in range(0, splits, ROUND):
        there = (first + split < splits)[:, None]
        place = (token * max_splits + first + split)[:, None] * COLUMNS + group[None, :] * HELD
        values = gl.load(partials + place[:, :, None] + held[None, None, :], there[:, :, None], other=0.0)
        split_lse = gl.load(lse + place // HEAD_DIM, there, other=float("-inf"))
        new_peak = gl.maximum(peak, gl.max(split_lse, 0))
        scales = gl.exp2(split_lse - new_peak[None, :])
        decay = gl.exp2(peak - new_peak)
        merged *= gl.convert_layout(decay, gl.SliceLayout(1, MERGED))[:, None]
        merged += gl.sum(values * scales[:, :, None], 0)
        total = total * decay + gl.sum(scales, 0)
        peak = new_peak
    dtype: gl.constexpr = residual.dtype.element_ty
    attended = (merged / gl.convert_layout(total, gl.SliceLayout(1, MERGED))[:, None]).to(dtype)
    attended = gl.convert_layout(attended.to(gl.float32), gl.SliceLayout(0, WEIGHTS))
    result = gl.sum(gl.sum(weights.to(gl.float32) * attended[None, :, :], 2), 1)
    if bias is not None:
        result += gl.load(bias + row).to(gl.float32)
    result = result.to(dtype)
    if ADDED:
        result = (before.to(gl.float32) + result.to(gl.float32)).to(dtype)
    gl.store(residual, result)
