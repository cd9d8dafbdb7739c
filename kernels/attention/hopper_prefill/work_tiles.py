"""Which queries a program of `attention.hopper_prefill.prefill` attends for, turn by turn.

A turn is a tile of BLOCK_Q consecutive queries of one sequence. Turns go from the last sequence to the first,
and from each one's last queries, which see the most keys, to its first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _find_sequence(
    query_starts: gl.tensor, num_sequences: gl.tensor, tile: gl.tensor, BLOCK_Q: gl.constexpr,
    WARPS: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Return the sequence of a query tile, and the tile's number within it: as in `attention.prefill`."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    begun = 0
    tile += gl.load(query_starts) // BLOCK_Q
    for first in range(0, num_sequences, 32):
        sequence = first + gl.arange(0, 32, LANES)
        starts = gl.load(query_starts + sequence, mask=sequence < num_sequences, other=0)
        begun += gl.sum(((starts // BLOCK_Q + sequence <= tile) & (sequence < num_sequences)).to(gl.int32), 0)
    return begun - 1, tile - (gl.load(query_starts + begun - 1) // BLOCK_Q + begun - 1)


@gluon.jit
def _tiles_of(
    query_len: gl.tensor, first_query: gl.tensor, context_len: gl.tensor, BLOCK_Q: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Count the tiles of keys that queries from `first_query` on see: one of padding, none without any."""
    end = gl.minimum(context_len - query_len + first_query + BLOCK_Q, context_len)
    return gl.where(first_query < query_len, gl.maximum((end + TILE - 1) // TILE, 1), 0)


@gluon.jit
def work_of(
    turn: gl.tensor, plan: gl.tuple, BLOCK_Q: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr
) -> gl.tuple:
    """Return a turn's row, its sequence's first token and queries, its own first query, context, key tiles.

    `plan` is rows, query_starts, context_lens, the number of sequences and that of turns.
    """
    rows, query_starts, context_lens, num_sequences, turns = plan
    sequence, query_tile = _find_sequence(query_starts, num_sequences, turns - 1 - turn, BLOCK_Q, WARPS)
    query_start = gl.load(query_starts + sequence)
    query_len = gl.load(query_starts + sequence + 1) - query_start
    first_query = query_tile * BLOCK_Q
    context_len = gl.load(context_lens + sequence)
    num_tiles = _tiles_of(query_len, first_query, context_len, BLOCK_Q, TILE)
    row = gl.load(rows + sequence)
    return row, query_start, query_len, first_query, context_len, num_tiles


@gluon.jit
def work_after(
    turn: gl.tensor, last_turn: gl.tensor, work: gl.tuple, plan: gl.tuple, BLOCK_Q: gl.constexpr,
    TILE: gl.constexpr, WARPS: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Return `work_of` the turn after a known one: mostly the queries before it, and nothing is read."""
    row, query_start, query_len, first_query, context_len, num_tiles = work
    if first_query > 0:
        first_query -= BLOCK_Q
        num_tiles = _tiles_of(query_len, first_query, context_len, BLOCK_Q, TILE)
    elif turn + 1 < last_turn:
        row, query_start, query_len, first_query, context_len, num_tiles = work_of(
            turn + 1, plan, BLOCK_Q, TILE, WARPS
        )
    return row, query_start, query_len, first_query, context_len, num_tiles
