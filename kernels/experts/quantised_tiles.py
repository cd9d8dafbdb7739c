"""Which tokens a program of experts in few bits has, of pairs that stand in the order of experts.

In Gluon, Triton's lower level; `grouped` does the same in Triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(first: gl.tensor, second: gl.tensor) -> gl.tensor:
    return first + second


@gluon.jit
def tile_of(
    counts: gl.tensor, tile: gl.tensor, EXPERTS: gl.constexpr, PADDED: gl.constexpr, TOKENS: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Return a tile's expert, its first pair, and how many it has: none past the last tile."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    every = gl.arange(0, PADDED, LAYOUT)
    count = gl.load(counts + every, mask=every < EXPERTS, other=0)
    tiles = (count + (TOKENS - 1)) // TOKENS
    ends = gl.associative_scan(tiles, 0, _add)
    expert = gl.sum((ends <= tile).to(gl.int32), 0)
    earlier = every < expert
    within = (tile - gl.sum(gl.where(earlier, tiles, 0), 0)) * TOKENS
    first = gl.sum(gl.where(earlier, count, 0), 0) + within
    size = gl.minimum(gl.sum(gl.where(every == expert, count, 0), 0) - within, TOKENS)
    return expert, first, size
