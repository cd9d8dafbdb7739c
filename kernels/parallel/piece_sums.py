"""Sums over two ranks of many rows: pieces are copied to the other rank while products of the next go on.

Kernels that send would take multiprocessors from the products, and so do NCCL's. A copy engine takes none: so
a product of many rows is computed in pieces, each is copied to the other rank's memory while the next one is
multiplied, and once the other's piece has come one kernel adds both to the residual, and normalises the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.parallel.buffers import NEVER

SLOTS = 4  # pieces that may be on their way
NUMBERS = 1 << 23  # of 16 bits, in a slot
TILE = 128  # rows: what products' tiles take
LEAST = 8 << 20  # bytes of all pieces; of fewer, nothing is gained by cutting


class Line(Protocol):
    """What joins two ranks, each of which has SLOTS slots that the other copies to.

    All is asked for in stream order. Both ranks do the same in the same order.
    """

    @property
    def open(self) -> bool:
        """Whether copies can be asked for now."""
        ...

    def send(self, x: Tensor, slot: int) -> Any:
        """Have x copied to the other's slot beside what is computed from now on; return the copy."""
        ...

    def receive(self, copy: Any, slot: int, like: Tensor) -> Tensor:
        """Have what follows wait for a copy, and for the other's to that slot, which is as `like`."""
        ...


class PieceSums:
    """Products' sums over two ranks, with the residual's addition and the norm.

    Nobody says that a slot is free again: a rank that has computed a piece has received the one two before
    it, which the other computed after it had added up the one four before, and that was in the same slot.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._slot = 0

    def takes(self, residual: Tensor) -> bool:
        """Tell, by shape, dtype and whether this is a capture, as it is on all ranks, what is summed here."""
        fits = residual.shape[1] * TILE <= NUMBERS and residual.dtype.itemsize == 2
        return fits and residual.nbytes > LEAST and self._line.open

    def add_rms_norm_of(
        self,
        multiply: Callable[[Tensor], Tensor],
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Add the ranks' sum of multiply(x): [T, K] -> [T, H] to residual [T, H]; return its RMSNorm and it.

        As `SumOverRanks.add_rms_norm_of`. Terms are two, so that their order gives the same bits.
        """
        normed = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)

        def finish(rows: slice, term: Tensor, slot: int, copy: Any) -> None:
            other = self._line.receive(copy, slot, term)
            add_two_norm(term, other, residual[rows], weight, eps, normed[rows])

        under_way: tuple[slice, Tensor, int, Any] | None = None
        for rows in pieces_of(*residual.shape):
            term = multiply(x[rows])
            slot, self._slot = self._slot, (self._slot + 1) % SLOTS
            copy = self._line.send(term, slot)
            if under_way is not None:
                finish(*under_way)
            under_way = (rows, term, slot, copy)
        if under_way is not None:
            finish(*under_way)
        return normed, residual


def pieces_of(rows: int, hidden: int) -> list[slice]:
    """Return two pieces of the rows or more, about as large, of whole tiles but for the last."""
    count = max(triton.cdiv(rows, NUMBERS // hidden // TILE * TILE), 2)
    step = triton.cdiv(triton.cdiv(rows, count), TILE) * TILE
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def add_two_norm(x: Tensor, other: Tensor, residual: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    """Add x and other [T, H], both contiguous, to residual [T, H] in place, and write its RMSNorm to y.

    Roundings are those of `all_reduce.one_shot_norm`.
    """
    rows, hidden = y.shape
    block = triton.next_power_of_2(hidden)
    # Not launched early: what the other rank has copied is there once the kernel ahead has ended.
    _add_two_norm_kernel[(rows,)](
        x, other, residual, weight, y, residual.stride(0), y.stride(0), eps, hidden, block,
        num_warps=min(max(block // 256, 1), 16),
    )  # fmt: skip


def add_two_norm_reference(
    x: Tensor, other: Tensor, residual: Tensor, weight: Tensor, eps: float, y: Tensor
) -> None:
    """Do the same as `add_two_norm` in plain torch."""
    residual += (x.float() + other.float()).to(x.dtype)
    wide = residual.float()
    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    y.copy_((wide * scale).to(x.dtype) * weight)


def wait_for(flag: Tensor) -> None:
    """Have what follows wait until the other rank has set a flag [1] i16, and take it down."""
    _wait_kernel[(1,)](flag, NEVER, num_warps=1)


@triton.jit(do_not_specialize=["most_polls"])
def _wait_kernel(flag_ptr: tl.tensor, most_polls: tl.tensor) -> None:
    seen = tl.load(flag_ptr, volatile=True)
    polls = 0
    while (seen == 0) & (polls < most_polls):
        seen = tl.load(flag_ptr, volatile=True)
        polls += 1
    tl.store(flag_ptr, 0)


@triton.jit
def _add_two_norm_kernel(
    x_ptr: tl.tensor,
    other_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    residual_stride: tl.tensor,
    y_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    residual_row = residual_ptr + row * residual_stride + column
    x = tl.load(x_ptr + row * HIDDEN + column, inside, other=0.0)
    other = tl.load(other_ptr + row * HIDDEN + column, inside, other=0.0)
    residual = tl.load(residual_row, inside, other=0.0)
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    total = (x.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
    total = (total.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(residual_row, total, inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / HIDDEN + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    tl.store(y_ptr + row * y_stride + column, (normed * weight).to(x.dtype), inside)
