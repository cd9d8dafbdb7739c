"""The pipeline that the warps of Hopper's prefill share: sizes, and places in shared memory by turns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # queries times heads of a consumer: what one wgmma takes
PANEL = gl.constexpr(64)  # 16-bit elements of a swizzled line of shared memory, 128 bytes
QUERIES = gl.constexpr(2)  # turns whose queries are in shared memory


@gluon.jit
def place_of(count: gl.tensor, PLACES: gl.constexpr) -> gl.tuple:
    """Return which of PLACES, a power of two, comes next after so many, and its barriers' phase then."""
    return count & (PLACES - 1), (count & PLACES) // PLACES


@gluon.jit
def uniform(value: gl.tensor) -> gl.tensor:
    """Return a scalar that all threads hold so that the assembler sees it, and computes with it once a warp.

    Places of barriers and tiles otherwise take 0.1 µs of each step.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [value],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
