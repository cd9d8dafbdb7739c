"""The warps of Hopper's prefill that have the copy engine (TMA) bring queries, keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from quire.kernels.attention.hopper_prefill.pipeline import CONSUMERS, PANEL, QUERIES, ROWS, place_of, uniform
from quire.kernels.attention.hopper_prefill.work_tiles import work_after


@gluon.jit
def _ask_for_queries(
    source: tma.tensor_descriptor, panels: gl.shared_memory_descriptor, place: gl.tensor,
    full: gl.shared_memory_descriptor, first_token: gl.tensor, GROUP: gl.constexpr, LANES: gl.constexpr,
    DIM: gl.constexpr,
) -> None:  # fmt: skip
    PANELS: gl.constexpr = DIM // PANEL
    mbarrier.expect(full, CONSUMERS * ROWS * DIM * 2)
    for half in gl.static_range(CONSUMERS):
        for panel in gl.static_range(PANELS):
            token = first_token + half * (ROWS // LANES)
            into = panels.index((place * CONSUMERS + half) * PANELS + panel)
            box = [token, gl.program_id(0) * GROUP, panel * PANEL]
            tma.async_copy_global_to_shared(source, box, full, into)


@gluon.jit
def produce(
    queries: gl.tuple, source: gl.tuple, stages: gl.tuple, todo: gl.tuple, first_row: gl.tensor,
    OF_KEYS: gl.constexpr,
    GROUP: gl.constexpr, LANES: gl.constexpr, BLOCK_SIZE: gl.constexpr, DIM: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """Fill the stages of K or of V in turn, with as many boxes as a tile has blocks; before K, queries."""
    kv_source, block_tables, table_stride, block_rows = source
    boxes, full, free = stages
    q_source, q_panels, q_full, q_free = queries
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    PANELS: gl.constexpr = DIM // PANEL
    work, plan, turns = todo
    row, query_start, query_len, first_query, context_len, num_tiles = work
    filled, asked = 0, 0
    for turn in range(turns[0], turns[1]):
        filled, num_tiles = uniform(filled), uniform(num_tiles)
        table = block_tables + row.to(gl.int64) * table_stride
        last_key = gl.maximum(context_len - 1, 0)
        if OF_KEYS and num_tiles > 0:
            place, phase = place_of(asked, QUERIES)
            mbarrier.wait(q_free.index(place), phase ^ 1)
            _ask_for_queries(
                q_source,
                q_panels,
                place,
                q_full.index(place),
                query_start + first_query,
                GROUP,
                LANES,
                DIM,
            )
            asked += 1
        for step in range(num_tiles):
            stage, phase = place_of(filled + step, STAGES)
            found: gl.tuple = ()
            for box in gl.static_range(BOXES):
                # Past the context any block of it will do.
                key = gl.minimum((num_tiles - 1 - step) * TILE + box * BOX, last_key)
                block = gl.load(table + key // BLOCK_SIZE)
                found += (block * block_rows + first_row + key % BLOCK_SIZE // BOX * BOX,)
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), TILE * DIM * 2)
            for box in gl.static_range(BOXES):
                for panel in gl.static_range(PANELS):
                    into = boxes.index((stage * PANELS + panel) * BOXES + box)
                    place_in_cache = [found[box], panel * PANEL]
                    tma.async_copy_global_to_shared(kv_source, place_in_cache, full.index(stage), into)
        filled += num_tiles
        work = (row, query_start, query_len, first_query, context_len, num_tiles)
        row, query_start, query_len, first_query, context_len, num_tiles = work_after(
            turn, turns[1], work, plan, CONSUMERS * ROWS // LANES, TILE, 1
        )
