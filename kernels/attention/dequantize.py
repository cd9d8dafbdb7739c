"""Keys and values of an fp12 cache in bf16, at the same places of a cache for one layer.

For `attention.hopper_prefill.prefill`, whose copy engine brings numbers as they are: there is no room for
planes to become numbers on the way. bf16 holds every number that fp12 does, so both kernels read the same.
Those of a step's own tokens `attention.write_kv` has written there, beside the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.attention.batch import PrefillBatch
from quire.kernels.formats.fp12 import load_quarters
from quire.kernels.formats.layer_cache import LayerCache

PROGRAMS = 2048  # of four warps: as many as an H100 runs at once
SEQUENCES = 256  # up to which one kernel serves all steps


@triton.jit(do_not_specialize=["num_sequences"])
def _dequantize_kernel(
    into: tl.tensor, kv: tl.tensor, kv_scales: tl.tensor, block_tables: tl.tensor, rows: tl.tensor,
    query_starts: tl.tensor, context_lens: tl.tensor, num_sequences: tl.tensor,
    table_stride: tl.tensor, block_stride: tl.tensor, part_stride: tl.tensor, head_stride: tl.tensor,
    slot_stride: tl.tensor, scale_block_stride: tl.tensor,
    SEQUENCES: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Write every so manyth of all sequences' earlier blocks, the keys or the values of one kv head."""
    QUARTER: tl.constexpr = DIM // 4
    part = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    sequence = tl.arange(0, SEQUENCES)
    is_there = sequence < num_sequences
    queries = tl.load(query_starts + sequence + 1, mask=is_there, other=0)
    queries -= tl.load(query_starts + sequence, mask=is_there, other=0)
    lens = tl.load(context_lens + sequence, mask=is_there, other=0)
    earlier = tl.maximum(lens - queries, 0)  # padding has queries without a context
    ends = tl.cumsum(tl.cdiv(earlier, BLOCK_SIZE), 0)  # of each sequence's blocks among all
    slot = tl.arange(0, BLOCK_SIZE)[:, None]
    column = tl.arange(0, QUARTER)[None, :]
    for index in range(tl.program_id(1), tl.max(ends, 0), tl.num_programs(1)):
        begun = tl.sum((ends <= index).to(tl.int32), 0)
        before = tl.max(tl.where(ends <= index, ends, 0), 0)
        table = block_tables + tl.load(rows + begun).to(tl.int64) * table_stride
        block = tl.load(table + index - before).to(tl.int64)
        vectors = kv + block * block_stride + part * part_stride + head * head_stride + slot * slot_stride
        planes = vectors.to(tl.pointer_type(tl.int16))
        scale = tl.load(kv_scales + block * scale_block_stride + (head * BLOCK_SIZE + slot) * 2 + part)
        quarters = load_quarters(planes, scale, slot >= 0, into.dtype.element_ty, QUARTER, BLOCK_SIZE, False)
        place = into + (((block * 2 + part) * KV_HEADS + head) * BLOCK_SIZE + slot) * DIM + column
        for quarter in tl.static_range(4):
            tl.store(place + quarter * QUARTER, quarters[quarter])


def dequantize(batch: PrefillBatch, cache: LayerCache) -> None:
    """Write rows' blocks up to a step's own tokens as numbers to `cache.dequantized`.

    What follows earlier tokens in their last block is whatever the cache has there; other blocks are left
    alone. A row with fewer tokens than queries is padding. Raises ValueError if there is no room that fits.
    """
    cache.check_dequantized()
    kv, scales, into = cache.kv, cache.scales, cache.dequantized
    if scales is None or into is None:
        raise ValueError(f"a cache in {cache.format.name} has no room to be dequantized into")
    vectors, count = 2 * cache.kv_heads, len(batch.rows)
    _dequantize_kernel[vectors, triton.cdiv(PROGRAMS, vectors)](
        into, kv, scales, batch.block_tables, batch.rows, batch.query_starts, batch.context_lens, count,
        batch.block_tables.stride(0), *kv.stride()[:4], scales.stride(0),
        SEQUENCES=max(SEQUENCES, triton.next_power_of_2(count)), KV_HEADS=cache.kv_heads,
        BLOCK_SIZE=cache.block_size, DIM=into.shape[4], num_warps=4,
    )  # fmt: skip
