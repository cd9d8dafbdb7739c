"""Fused linear layers of one token for Hopper, whose weights wait in shared memory.

In Gluon, Triton's lower level. A layer of a small model is a chain of short kernels, and the memory idles
whenever one waits for the one before. So a program has the copy engine (TMA) bring all of its weights before
the kernels ahead have ended. `linear.gemv` holds what it asks for in registers, of which its programs then
leave none for the next kernel's: that begins only when they end. Here a program has few registers, and the
weights of several kernels are on their way at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gpu import Gpu
from quire.kernels.launch import dependent_launch
from quire.kernels.linear import gemv, hopper_stream
from quire.kernels.linear.linear import Matrix
from quire.kernels.pointwise.activation import Activation, UngatedActivation, activate
from quire.kernels.tuning import Tuning

WARPS = 2
HELD = gl.constexpr(8)  # columns that a thread reads at a time, 16 bytes
READ = gl.constexpr(32 * 8)  # columns that a warp reads at a time
LINES = (256, 128)  # columns, of which a weight's are a multiple: what a warp reads, or half of that
MOST_COLUMNS = 8192  # of which a thread holds its part of the token


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("w_source", "norm"))


@gluon.jit
def _part_of(
    numbers: gl.tensor, first: gl.constexpr, place: gl.tensor, COLUMNS: gl.constexpr, WHOLE: gl.constexpr
) -> gl.tensor:
    """Return the numbers [COLUMNS] at `first` + place, 0 beyond the last; WHOLE: there is no place beyond."""
    if WHOLE:
        part = gl.load(numbers + (first + place))
    else:
        part = gl.load(numbers + (first + place), mask=first + place < COLUMNS, other=0.0)
    return part


@gluon.jit
def _lines_of(
    tile: gl.shared_memory_descriptor, first: gl.constexpr, COUNT: gl.constexpr
) -> gl.shared_memory_descriptor:
    """Return COUNT lines of all rows from `first` on, of what the copy engine left without swizzling."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return tile._reinterpret(tile.dtype, tile.shape, PLAIN).slice(first, COUNT, dim=1)


@gluon.jit
def _kernel(
    out: gl.tensor, x: gl.tensor, w_source: tma.tensor_descriptor, bias: gl.tensor, norm: gl.tensor,
    eps: gl.tensor,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, LINE: gl.constexpr,
    COPIED: gl.constexpr, GATED: gl.constexpr, ADDED: gl.constexpr, KIND: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS outputs of the token; with GATED, those of the gate and of the up projection.

    COPIED lines of all rows come at a time. Each warp multiplies rows of its own, READ columns at a time.
    """
    WARPS: gl.constexpr = gl.num_warps()
    BESIDE: gl.constexpr = READ // LINE
    STEPS: gl.constexpr = (COLUMNS + READ - 1) // READ
    WHOLE: gl.constexpr = COLUMNS % READ == 0
    COPIES: gl.constexpr = (STEPS * BESIDE + COPIED - 1) // COPIED
    HALVES: gl.constexpr = 2 if GATED else 1
    TILE: gl.constexpr = gl.NVMMASharedLayout(0, 16, rank=3)
    W: gl.constexpr = gl.BlockedLayout(
        [ROWS // WARPS, 1, HELD], [1, BESIDE, LINE // HELD], [WARPS, 1, 1], [2, 1, 0]
    )
    X: gl.constexpr = gl.SliceLayout(0, W)
    RESULT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, W))
    dtype: gl.constexpr = w_source.dtype
    first_row = gl.program_id(0) * ROWS
    if DEPENDENT and not GATED and not ADDED:  # what follows, attention above all, asks for little
        gdc_launch_dependents()
    tiles: gl.tuple = ()
    for _ in gl.static_range(HALVES * COPIES):
        tiles += (gl.allocate_shared_memory(dtype, [ROWS, COPIED, LINE], TILE),)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    fence_async_shared()
    mbarrier.expect(full, HALVES * COPIES * ROWS * COPIED * LINE * 2)
    for copy in gl.static_range(COPIES):
        tma.async_copy_global_to_shared(w_source, [first_row, copy * COPIED, 0], full, tiles[copy])
        if GATED:
            place_of_up = [OUTPUTS + first_row, copy * COPIED, 0]
            tma.async_copy_global_to_shared(w_source, place_of_up, full, tiles[COPIES + copy])
    if DEPENDENT and (GATED or ADDED):
        gdc_launch_dependents()
    line = gl.arange(0, BESIDE, gl.SliceLayout(1, X))[:, None]
    place = line * LINE + gl.arange(0, LINE, gl.SliceLayout(0, X))[None, :]
    norms: gl.tuple = ()
    if norm is not None:
        for step in gl.static_range(STEPS):
            norms += (_part_of(norm, step * READ, place, COLUMNS, WHOLE),)
    if DEPENDENT:
        gdc_wait()  # from here on what earlier kernels wrote may be read, and their inputs written
    values: gl.tuple = ()
    for step in gl.static_range(STEPS):
        values += (_part_of(x, step * READ, place, COLUMNS, WHOLE),)
    row = first_row + gl.arange(0, ROWS, RESULT)
    if ADDED:
        before = gl.load(out + row).to(gl.float32)
    if norm is not None:
        squares = gl.zeros([BESIDE, LINE], gl.float32, X)
        for step in gl.static_range(STEPS):
            exact = values[step].to(gl.float32)
            squares += exact * exact
        scale = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / COLUMNS + eps)
    mbarrier.wait(full, 0)
    acc = gl.zeros([ROWS, BESIDE, LINE], gl.float32, W)
    up_acc = gl.zeros([ROWS, BESIDE, LINE], gl.float32, W)
    for step in gl.static_range(STEPS):
        part = values[step].to(gl.float32)
        if norm is not None:
            part *= norms[step].to(gl.float32)
        tile = _lines_of(tiles[step * BESIDE // COPIED], step * BESIDE % COPIED, BESIDE)
        acc += tile.load(W).to(gl.float32) * part[None, :, :]
        if GATED:
            tile = _lines_of(tiles[COPIES + step * BESIDE // COPIED], step * BESIDE % COPIED, BESIDE)
            up_acc += tile.load(W).to(gl.float32) * part[None, :, :]
    result = gl.sum(gl.sum(acc, 2), 1)
    up = gl.sum(gl.sum(up_acc, 2), 1)
    if norm is not None:
        result *= scale
        up *= scale
    if bias is not None:
        result += gl.load(bias + row).to(gl.float32)
        if GATED:
            up += gl.load(bias + OUTPUTS + row).to(gl.float32)
    result = result.to(dtype)
    if KIND is not None:  # rounded where the unfused layers round, as below
        result = activate(result.to(gl.float32), KIND).to(dtype)
    if GATED:
        result = (result.to(gl.float32) * up.to(dtype).to(gl.float32)).to(dtype)
    if ADDED:
        result = (before + result.to(gl.float32)).to(dtype)
    gl.store(out + row, result)


@dataclass(frozen=True, slots=True)
class Division:
    """A program's outputs and warps, the columns of a line, and the lines of each that come at a time."""

    rows: int
    warps: int
    line: int
    copied: int


def division(outputs: int, columns: int, *, plain: bool) -> Division | None:
    """Return how a weight [outputs, columns] is divided, None if it cannot be.

    plain: of a product that is neither gated nor added, as into attention. As measured on an H100 within
    layers of 0.6B to 3B (loadtest/results/one-token-held.json): a warp that has whole rows needs no other
    one's sums, and small programs leave room for the next kernel's.
    """
    line = next((each for each in LINES if columns % each == 0), None)
    rows = 4 if plain else 2
    if line is None or columns > MOST_COLUMNS or outputs % rows:
        return None
    lines = columns // line
    return Division(rows, WARPS, line, copied=max(READ.value // line, lines & -lines))


def supports(gpu: Gpu, dtype: torch.dtype, weight: Matrix, *, gated: bool) -> bool:
    """Tell whether `linear_of_one_held` takes a weight, of a gate and an up projection if gated."""
    outputs = weight.outputs // 2 if gated else weight.outputs
    return (
        hopper_stream.supports(gpu, dtype)
        and division(outputs, weight.inputs, plain=False) is not None
        and division(outputs, weight.inputs, plain=True) is not None
    )


def prefers(weight: Matrix, tuning: Tuning, *, gated: bool, hidden: int) -> bool:
    """Tell whether one token is quicker here than elsewhere, in a layer whose input has `hidden` columns.

    As measured in steps and layers on an H100 (loadtest/results/one-token-held.json). In smaller layers the
    kernels around attention leave it less room, and one like Qwen3-0.6B's takes longer in steps. Gates of a
    few whole pieces are as quick by `linear.gemv`, and so are long sums for few outputs; large weights into
    attention keep the memory busy anyway.
    """
    least, most = tuning.held_columns
    if not least <= hidden <= most:
        return False
    if gated:
        return weight.inputs not in gemv.WHOLE_PIECES_OF_GATE
    if weight.inputs == hidden != weight.outputs:
        return weight.elements <= tuning.held_weights
    return weight.inputs <= 2 * weight.outputs


def linear_of_one_held(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    *,
    gated: bool,
    added: bool,
    activation: Activation | UngatedActivation | None = None,
) -> None:
    """Compute out [1, N] of x [1, K], as `linear.gemv.linear_of_one` does.

    activation: of the product, or of a gate, which has SiLU without one.
    """
    columns, outputs = x.shape[1], out.shape[1]
    found = division(outputs, columns, plain=not gated and not added)
    if len(x) != 1 or not weight.is_contiguous() or found is None:
        raise ValueError(
            f"this is for one token, a contiguous weight of {' or '.join(map(str, LINES))} columns, or a "
            f"multiple of them up to {MOST_COLUMNS}, and outputs that programs divide; got {len(x)} tokens, "
            f"strides {weight.stride()}, {columns} columns and {outputs} outputs"
        )
    layout = gl.NVMMASharedLayout(0, 16, rank=3)
    _kernel[(outputs // found.rows,)](
        out, x,
        TensorDescriptor(
            weight, [len(weight), columns // found.line, found.line], [columns, found.line, 1],
            [found.rows, found.copied, found.line], layout,
        ),
        bias, norm, eps,
        OUTPUTS=outputs, COLUMNS=columns, ROWS=found.rows, LINE=found.line, COPIED=found.copied,
        GATED=gated, ADDED=added, KIND=activation or ("silu" if gated else None), num_warps=found.warps,
        **dependent_launch(x.device),
    )  # fmt: skip
