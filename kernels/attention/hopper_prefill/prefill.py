"""Prefill attention for Hopper: the copy engine fills tiles of keys while two warpgroups multiply others.

In Gluon, Triton's lower level. Two producers of one warp each have the copy engine (TMA) bring K and V, block
by block as the block table says, into stages of shared memory. Two consumers of four warps attend to them,
each for half of the program's queries, and multiply a tile's weights with V while they compute the next
tile's scores (after FlashAttention-3, Shah et al. 2024). Barriers in shared memory say which stage is full
and which one may be filled again.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from quire.kernels.attention.batch import AttentionLayer, PrefillBatch
from quire.kernels.attention.hopper_prefill.consumer import consume
from quire.kernels.attention.hopper_prefill.pipeline import CONSUMERS, PANEL, QUERIES, ROWS
from quire.kernels.attention.hopper_prefill.producer import produce
from quire.kernels.attention.hopper_prefill.work_tiles import work_of
from quire.kernels.attention.kv_tile import LOG2_E
from quire.kernels.formats.kv_format import FP12, KVFormat
from quire.kernels.gpu import Gpu, gpu_of

MOST_STAGED = 256  # keys in shared memory at a time
LEAST_BLOCK = 16  # tokens: a copy engine brings the keys of a block at once, in shared memory eight at a time
# Turns of a program. On an H100 one, two, three bring 250, 302, 326 TFLOP/s at 32 × 512; 2 × 8192 are as
# quick with one to three, and up to a tenth slower with four.
MOST_TURNS = 3
LEAST_ROUNDS = 4  # programs for each multiprocessor: fewer, longer ones would end at very different times
SHORT = 1024  # queries up to which half a tile of keys wastes less than it costs


@gluon.jit(do_not_specialize=["num_sequences", "turns", "turns_each"])
def _kernel(
    out: gl.tensor, q_source: tma.tensor_descriptor, kv_source: tma.tensor_descriptor,
    block_tables: gl.tensor, rows: gl.tensor, query_starts: gl.tensor, context_lens: gl.tensor,
    num_sequences: gl.tensor, turns: gl.tensor, turns_each: gl.tensor, num_kv_heads: gl.tensor,
    scale_log2: gl.tensor, table_stride: gl.tensor, block_rows: gl.tensor, part_rows: gl.tensor,
    GROUP: gl.constexpr, LANES: gl.constexpr, BLOCK_SIZE: gl.constexpr, DIM: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """For all query heads of one kv head, `turns_each` of the `turns` of CONSUMERS * ROWS // LANES queries.

    LANES are a query's rows of a tile, a power of two: those beyond GROUP hold other kv heads' queries, or
    zeros, and what they attend to is left out.
    While the last keys of a turn are attended to, the first ones of the next are on their way.
    """
    # Decode attention may run beside the last programs: it relies on this kernel having begun only when all
    # before it had ended, so do not launch this one dependently.
    gdc_launch_dependents()
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS // LANES
    first_turn = gl.program_id(1) * turns_each
    last_turn = gl.minimum(first_turn + turns_each, turns)
    plan = (rows, query_starts, context_lens, num_sequences, turns)
    work = work_of(first_turn, plan, BLOCK_Q, TILE, 4)
    if (work[5] == 0) & (last_turn - first_turn == 1):
        return

    # A tile of shared memory is panels of PANEL columns with all rows each, in which boxes follow each other.
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    PANELS: gl.constexpr = DIM // PANEL
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SHARED_Q: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = out.dtype.element_ty
    boxes: gl.constexpr = [STAGES * PANELS * (TILE // BOX), BOX, PANEL]
    panels: gl.constexpr = [QUERIES * CONSUMERS * PANELS, ROWS // LANES, LANES, PANEL]
    q_panels = gl.allocate_shared_memory(dtype, panels, SHARED_Q)
    k_boxes = gl.allocate_shared_memory(dtype, boxes, SHARED)
    v_boxes = gl.allocate_shared_memory(dtype, boxes, SHARED)
    queries = q_panels._reinterpret(dtype, [QUERIES * CONSUMERS, ROWS, DIM], SHARED)
    keys = k_boxes._reinterpret(dtype, [STAGES, TILE, DIM], SHARED)
    values = v_boxes._reinterpret(dtype, [STAGES, TILE, DIM], SHARED)

    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARRIER)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for place in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(place), 1)
        mbarrier.init(q_free.index(place), CONSUMERS)
    mbarrier.init(cleared, CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), 1)
        mbarrier.init(k_free.index(stage), CONSUMERS)
        mbarrier.init(v_full.index(stage), 1)
        mbarrier.init(v_free.index(stage), CONSUMERS)
    fence_async_shared()
    barriers = (k_full, k_free, v_full, v_free)
    between = (first_turn, last_turn)
    read = (queries, keys, values, barriers, q_full, q_free, cleared)
    asked = (q_source, q_panels, q_full, q_free)
    source = (kv_source, block_tables, table_stride, block_rows)
    k_stages, v_stages = (k_boxes, k_full, k_free), (v_boxes, v_full, v_free)
    k_row = gl.program_id(0) * BLOCK_SIZE
    v_row = k_row + part_rows
    todo = (work, plan, between)
    gl.warp_specialize(
        [
            (consume, (out, read, todo, num_kv_heads, scale_log2, 0, GROUP, LANES, DIM, TILE, STAGES)),
            (consume, (out, read, todo, num_kv_heads, scale_log2, 1, GROUP, LANES, DIM, TILE, STAGES)),
            (
                produce,
                (asked, source, k_stages, todo, k_row, True, GROUP, LANES, BLOCK_SIZE, DIM, TILE, STAGES),
            ),
            (
                produce,
                (asked, source, v_stages, todo, v_row, False, GROUP, LANES, BLOCK_SIZE, DIM, TILE, STAGES),
            ),
        ],
        worker_num_warps=[4, 1, 1],
        worker_num_regs=[232, 32, 32],  # as many as keep all variants from spilling
    )


def turns_of_a_program(turns: int, multiprocessors: int) -> int:
    """Return as many turns as leave programs enough for each multiprocessor."""
    return max(min(turns // (multiprocessors * LEAST_ROUNDS), MOST_TURNS), 1)


def takes_heads(gpu: Gpu, dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> bool:
    """Tell whether `hopper_prefill` takes `group` query heads of dtype for each kv head, and such blocks.

    It wants Hopper's instructions, 16-bit numbers, heads of 64 or 128 in groups of up to 64, and blocks of 16
    or more.
    """
    return (
        gpu.has_warpgroup_products
        and dtype.itemsize == 2
        and head_dim in (64, 128)
        and group <= ROWS.value
        and block_size >= LEAST_BLOCK
    )


def dequantizes(
    gpu: Gpu, dtype: torch.dtype, held: KVFormat, head_dim: int, group: int, block_size: int
) -> bool:
    """Tell whether a cache is to be dequantized for `hopper_prefill`: fp12, which is as exact as bf16."""
    return held == FP12 and dtype == torch.bfloat16 and takes_heads(gpu, dtype, head_dim, group, block_size)


def supports(
    gpu: Gpu, dtype: torch.dtype, held: KVFormat, head_dim: int, group: int, block_size: int
) -> bool:
    """Tell whether `hopper_prefill` takes such heads, as `takes_heads`, and a cache, maybe dequantized."""
    alike = held.dtype == dtype or dequantizes(gpu, dtype, held, head_dim, group, block_size)
    return alike and takes_heads(gpu, dtype, head_dim, group, block_size)


def prefers(longest_query: int, group: int, *, dequantized: bool) -> bool:
    """Tell whether `hopper_prefill` is quicker than `attention.prefill`, over a cache maybe dequantized.

    There have to be more queries than the narrowest tile of that holds. The other makes numbers of fp12's
    planes anew for each tile of queries, but leaves no lanes idle if a group is no power of two: of numbers
    an eighth of them may be (7 heads of 8: 591 µs of an H100 beside 660, 8 prompts of 2,048).
    """
    few_idle = 8 * group >= 7 * triton.next_power_of_2(group)
    return longest_query * group > ROWS.value and (dequantized or few_idle)


def hopper_prefill(
    q: torch.Tensor, out: torch.Tensor, kv: torch.Tensor, batch: PrefillBatch, layer: AttentionLayer
) -> None:
    """Do as `attention.prefill.prefill` without a window, of kv as numbers, of what is supported."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2:4]
    group = num_q_heads // num_kv_heads
    lanes = triton.next_power_of_2(group)
    tile = 64 if batch.max_query_len <= SHORT else 128
    panel, rows_a_block = PANEL.value, kv.stride(0) // head_dim
    q_source = TensorDescriptor(
        q,
        [num_tokens, num_q_heads, head_dim],
        [q.stride(0), head_dim, 1],
        [ROWS.value // lanes, lanes, panel],
        gl.NVMMASharedLayout(128, 16, rank=3),
    )
    # The layer's part of the cache as rows of one head and token; what lies between is other layers'.
    kv_source = TensorDescriptor(
        kv,
        [(kv.shape[0] - 1) * rows_a_block + 2 * num_kv_heads * block_size, head_dim],
        [head_dim, 1],
        [min(block_size, tile), panel],
        gl.NVMMASharedLayout(128, 16, rank=2),
    )
    num_sequences = batch.rows.shape[0]
    block_q = CONSUMERS.value * ROWS.value // lanes
    turns = num_tokens // block_q + num_sequences
    turns_each = turns_of_a_program(num_kv_heads * turns, gpu_of(q.device).multiprocessors)
    _kernel[num_kv_heads, triton.cdiv(turns, turns_each)](
        out, q_source, kv_source, batch.block_tables, batch.rows, batch.query_starts, batch.context_lens,
        num_sequences, turns, turns_each, num_kv_heads,
        layer.scale * LOG2_E, batch.block_tables.stride(0), rows_a_block, kv.stride(1) // head_dim,
        GROUP=group, LANES=lanes, BLOCK_SIZE=block_size, DIM=head_dim, TILE=tile,
        STAGES=MOST_STAGED // tile, num_warps=4,
    )  # fmt: skip
