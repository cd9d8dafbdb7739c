"""Sums over ranks that write into each other's memory, alone and fused with the residual's addition and norm.

One-shot: every rank sends its numbers to all, and adds up what it got. Two-shot: every rank adds up its slice
of the numbers and sends the sums to all, which for many ranks is fewer bytes, and one way more. Terms are
added in fp32 in the order of the ranks, in both, so that all ranks get the same bits, whatever the batch.
`buffers` tells how numbers arrive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.parallel.buffers import SymmetricBuffers
from quire.kernels.parallel.exchange import begin_call, clear, end_call, received, send, sendable
from quire.kernels.parallel.terms import sum_terms_reference
from quire.kernels.pointwise.norm import add_rms_norm_reference

TILE = 2048  # numbers of a tile of two-shot sums
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WHOLE = (0, 9)  # the phases of a call: all of them


# -- the definition -----------------------------------------------------------------------------------------


def all_reduce_reference(terms: list[Tensor]) -> Tensor:
    """Add the ranks' terms in plain torch: in fp32, in their order, rounded once."""
    return sum_terms_reference(torch.stack(terms))


def all_reduce_norm_reference(
    terms: list[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the sum of terms [T, H] to residual [T, H] in place, in plain torch -> (RMSNorm, residual)."""
    return add_rms_norm_reference(all_reduce_reference(terms), residual, weight, eps)


# -- launches -----------------------------------------------------------------------------------------------


def one_shot_units(x: Tensor, ranks: int) -> int:
    """Return how much of a buffer a one-shot sum of x takes, in units of 16 bits."""
    return ranks * x.numel() * x.element_size() // 2


def two_shot_units(x: Tensor, ranks: int) -> int:
    """Return how much of a buffer a two-shot sum of x takes, in units of 16 bits."""
    columns = triton.cdiv(x.numel(), ranks * TILE)
    return 2 * ranks * columns * TILE * x.element_size() // 2


def one_shot(x: Tensor, buffers: SymmetricBuffers, phases: tuple[int, int] = WHOLE) -> Tensor:
    """Sum x [T, H] over the ranks -> [T, H], contiguous.

    phases: of [0, 2), which of sending (0) and receiving (1) to do: ranks that run one after the other in
    one process must all have sent before one receives.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_one_shot(x, None, None, y, 0.0, buffers, phases)
    return y


def one_shot_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    buffers: SymmetricBuffers,
    phases: tuple[int, int] = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Add the sum over the ranks of x [T, H] to residual [T, H] in place -> (RMSNorm of that, residual).

    Or of x [S, T, H] in fp32: parts of this rank's term, whose sum is rounded to the residual's dtype, and
    then sent. Roundings are those of `one_shot` and `pointwise.norm.add_rms_norm` after it. phases: as there.
    """
    in_parts = x.dim() == 3
    if residual.shape != x.shape[-2:] or residual.dtype != (residual.dtype if in_parts else x.dtype):
        raise ValueError(f"x {x.dtype} {list(x.shape)}, but residual {residual.dtype} {list(residual.shape)}")
    if in_parts and (x.dtype != torch.float32 or not x.is_contiguous()):
        raise ValueError(f"parts of a term must be contiguous fp32, not {x.dtype} with strides {x.stride()}")
    y = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    _launch_one_shot(x, residual, weight, y, eps, buffers, phases)
    return y, residual


def two_shot(x: Tensor, buffers: SymmetricBuffers, phases: tuple[int, int] = WHOLE) -> Tensor:
    """Sum x, contiguous, of a multiple of 8 numbers, over the ranks -> the same shape.

    phases: of [0, 3), which of sending (0), adding (1) and receiving (2) to do, as in `one_shot`.
    """
    _check(x, buffers, two_shot_units(x, buffers.ranks))
    if not x.is_contiguous() or x.numel() % 8:
        raise ValueError(
            f"x must be contiguous, a multiple of 8 numbers, not {list(x.shape)} with strides {x.stride()}"
        )
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    columns = triton.cdiv(x.numel(), buffers.ranks * TILE)
    _two_shot_kernel[(min(columns, buffers.programs),)](
        x,
        y,
        buffers.own,
        buffers.addresses,
        buffers.state,
        buffers.units,
        x.numel() // 8,
        columns,
        buffers.rank,
        buffers.most_polls,
        buffers.ranks,
        TILE,
        *phases,
        num_warps=8,
        **dependent_launch(x.device),
    )
    return y


def _launch_one_shot(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    y: Tensor,
    eps: float,
    buffers: SymmetricBuffers,
    phases: tuple[int, int],
) -> None:
    _check(y, buffers, one_shot_units(y, buffers.ranks))
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(f"x must be rows of [T, H], it is {list(x.shape)} with strides {x.stride()}")
    rows, hidden = y.shape
    if y.numel() == 0:
        return
    block = triton.next_power_of_2(hidden)
    _one_shot_kernel[(min(rows, buffers.programs),)](
        x,
        residual,
        weight,
        y,
        buffers.own,
        buffers.addresses,
        buffers.state,
        buffers.units,
        x.stride(-2),
        0 if residual is None else residual.stride(0),
        eps,
        rows,
        buffers.rank,
        buffers.most_polls,
        buffers.ranks,
        hidden,
        block,
        len(x) if x.dim() == 3 else 0,
        *phases,
        num_warps=min(max(block // 256, 1), 16),  # as the norm alone has it
        **dependent_launch(x.device),
    )


def _check(x: Tensor, buffers: SymmetricBuffers, units: int) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be bf16, fp16 or fp32, not {x.dtype}")
    if x.device != buffers.own.device:
        raise ValueError(f"x is on {x.device}, the rank's buffers are on {buffers.own.device}")
    if units > buffers.units:
        raise ValueError(
            f"{list(x.shape)} of {x.dtype} over {buffers.ranks} ranks takes {units} units of a buffer, which "
            f"has {buffers.units}"
        )


# -- kernels ------------------------------------------------------------------------------------------------

# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("weight_ptr",))


@triton.jit(do_not_specialize=["buffer_units", "rows", "rank", "most_polls"])
def _one_shot_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    own_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    state_ptr: tl.tensor,
    buffer_units: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    rows: tl.tensor,
    rank: tl.tensor,
    most_polls: tl.tensor,
    RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    index, used = begin_call(state_ptr)
    element: tl.constexpr = y_ptr.dtype.element_ty
    wide: tl.constexpr = element.primitive_bitwidth // 16
    word: tl.constexpr = tl.pointer_type(tl.int16 if wide == 1 else tl.int32)
    buffer = tl.multiple_of(index.to(tl.int64) * (buffer_units // wide), 8)
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if BEGIN <= 0:
        for row in range(first, rows, step):
            x = tl.load(x_ptr + row * x_stride + column, inside, other=0.0)
            for part in tl.static_range(1, PARTS):
                place = (part * rows + row) * HIDDEN + column
                x += tl.load(x_ptr + place, inside, other=0.0)
            x = x.to(element)
            at = buffer + (rank * rows + row) * HIDDEN + column
            send(x, at, inside, addresses_ptr, word, RANKS)
        clear(own_ptr, index, used, buffer_units, BLOCK)
    if END > 1:
        own = own_ptr.to(word)
        for row in range(first, rows, step):
            if residual_ptr is not None:
                residual_row = residual_ptr + row * residual_stride + column
                residual = tl.load(residual_row, inside, other=0.0)
            at = own + buffer + row * HIDDEN + column
            total = received(at, rows.to(tl.int64) * HIDDEN, inside, most_polls, element, RANKS)
            x = total.to(element)
            if residual_ptr is not None:
                x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
                tl.store(residual_row, x, inside)
                summed = x.to(tl.float32)
                scale = tl.rsqrt(tl.sum(summed * summed) / HIDDEN + eps)
                x = ((summed * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype)
            tl.store(y_ptr + row * HIDDEN + column, x, inside)
        end_call(state_ptr, index, RANKS * rows * HIDDEN * wide)


@triton.jit(do_not_specialize=["buffer_units", "eighths", "columns", "rank", "most_polls"])
def _two_shot_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    own_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    state_ptr: tl.tensor,
    buffer_units: tl.tensor,
    eighths: tl.tensor,
    columns: tl.tensor,
    rank: tl.tensor,
    most_polls: tl.tensor,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Sum in slices of `columns` tiles. A program does the same tiles of every rank's slice, in all phases.

    A buffer holds every rank's term of this rank's slice, and behind them the sums of all slices.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    index, used = begin_call(state_ptr)
    element: tl.constexpr = x_ptr.dtype.element_ty
    wide: tl.constexpr = element.primitive_bitwidth // 16
    word: tl.constexpr = tl.pointer_type(tl.int16 if wide == 1 else tl.int32)
    buffer = tl.multiple_of(index.to(tl.int64) * (buffer_units // wide), 8)
    own = own_ptr.to(word) + buffer
    first, step = tl.program_id(0), tl.num_programs(0)
    in_slice = columns * TILE
    numbers = eighths * 8  # so that a whole vector is inside or outside
    if BEGIN <= 0:
        for tile in range(first, columns, step):
            place = tile * TILE + tl.arange(0, TILE)
            for owner in tl.static_range(RANKS):
                inside = owner * in_slice + place < numbers
                x = tl.load(x_ptr + owner * in_slice + place, inside, other=0.0)
                bits = sendable(x)
                there = tl.multiple_of(tl.load(addresses_ptr + owner).to(word), 16)
                tl.store(there + buffer + rank * in_slice + place, bits, inside)
        clear(own_ptr, index, used, buffer_units, TILE)
    if BEGIN <= 1 and END > 1:
        for tile in range(first, columns, step):
            place = tile * TILE + tl.arange(0, TILE)
            inside = rank * in_slice + place < numbers
            total = received(own + place, in_slice, inside, most_polls, element, RANKS)
            at = buffer + RANKS * in_slice + rank * in_slice + place
            send(total.to(element), at, inside, addresses_ptr, word, RANKS)
    if END > 2:
        for tile in range(first, columns, step):
            for owner in tl.static_range(RANKS):
                place = owner * in_slice + tile * TILE + tl.arange(0, TILE)
                inside = place < numbers
                total = received(own + RANKS * in_slice + place, 0, inside, most_polls, element, 1)
                tl.store(y_ptr + place, total.to(element), inside)
        end_call(state_ptr, index, 2 * RANKS * in_slice * wide)
