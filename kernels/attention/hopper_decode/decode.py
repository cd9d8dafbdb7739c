"""Decode attention from Hopper on: each warp has keys of its own, the first on their way before their turn.

In Gluon, Triton's lower level. Of each tile every warp attends to a part of the keys, with a softmax of its
own, so that no numbers go from warp to warp until all are merged in the end. Stages of shared memory are
filled by asynchronous copies, the first ones before the kernel ahead has ended. Where rows alone fill the
device, up to twice, long ones are still divided, that nobody waits for them: the last program of a row merges
its parts.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, DecodeBatch
from quire.kernels.attention.hopper_decode.decode_kernel import decode_kernel
from quire.kernels.attention.hopper_decode.products import LANES
from quire.kernels.attention.hopper_decode.tiles import WARPS, WIDEST
from quire.kernels.attention.kv_tile import LOG2_E
from quire.kernels.attention.splits import (
    FULL_DEVICE,
    DecodeWorkspace,
    Division,
    Sparing,
    full_device,
    plan_division,
)
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.formats.kv_scales import words
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import Gpu, gpu_of

TILE = 64  # keys
MOST_PROGRAMS = 2  # of a group: each reads its keys, the second from the L2 cache
LEAST_BLOCK = 16  # tokens: no smaller blocks were tried; the plain kernel takes those
# A stage is filled again as soon as it has been read. Of 256 rows of 1,024 keys 2, 3, 4 stages bring 3.00,
# 2.96, 2.89 TB/s on an H100.
STAGES = 2
# Of few rows in many splits, each of a tile or a few: with one a program takes less than 48 KiB, as
# `attention.decode` wants it behind kernels that take little. A layer of 4 and of 8 rows of Qwen3-0.6B takes
# 22.9 and 26.9 µs on an H100, with two 25.9 and 29.6.
SMALL_STAGES = 1
# Of heads of more than 128 a multiprocessor has room for two programs with one stage, or for one with STAGES.
# 256 rows of 1,900 keys take a layer like Gemma 3 1B's 215.8 µs with one on an H100, 218.9 with two, 32 rows
# in four splits 56.5 and 52.8, one in 30 splits 36.5 and 32.7.
STAGES_OF_HALVES = 1
BRINGS_UP_TO = 2 * FULL_DEVICE  # programs; with more of them it costs up to 1 %


def programs_of_group(group: int) -> int:
    """Return how many programs attend to the same keys, each for a part of the group."""
    return triton.cdiv(group, LANES.value)


def stages_of(gpu: Gpu, dim: int, programs: int, *, small: bool) -> int:
    """Return the stages of so many programs for heads of up to dim, a power of two.

    small: in little shared memory, which heads of more than 128 have no use for.
    """
    if dim <= WIDEST.value:
        return SMALL_STAGES if small else STAGES
    needed = 2 * dim * (2 * STAGES * TILE + LANES.value)  # bytes of keys, values and queries
    alone = programs <= full_device(dim) and needed <= gpu.shared_memory
    return STAGES if alone else STAGES_OF_HALVES


def takes_heads(gpu: Gpu, dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> bool:
    """Tell whether `hopper_decode` takes `group` query heads of dtype for each kv head, and such blocks.

    It wants dependent launches, 16-bit numbers, heads of up to 256 in groups of up to 32, and blocks of 16 or
    more. A multiple of 8 is copied in pieces of 16 bytes; heads of 32 and less were not tried.
    """
    return (
        gpu.has_dependent_launch
        and dtype.itemsize == 2
        and 32 < head_dim <= 256
        and head_dim % 8 == 0
        and programs_of_group(group) <= MOST_PROGRAMS
        and block_size >= LEAST_BLOCK
    )


def supports(
    gpu: Gpu, dtype: torch.dtype, held: KVFormat, head_dim: int, group: int, block_size: int
) -> bool:
    """Tell whether `hopper_decode` takes such query heads, as `takes_heads`, and a cache.

    Both are of one type, or the heads in bf16 and the cache of planes, which are of heads of 64 or 128.
    """
    planes = dtype == torch.bfloat16 and held.planes > 0 and head_dim in (64, 128)
    alike = held.dtype == dtype or planes
    return alike and takes_heads(gpu, dtype, head_dim, group, block_size)


def hopper_decode(
    q: Tensor,
    out: Tensor,
    batch: DecodeBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    workspace: DecodeWorkspace,
    splits: int,
    prefixes: tuple[Tensor | None, ...],
    ready: int,
    stages: int,
    *,
    new: bool,
    beside: bool,
    sparing: Sparing | None,
) -> None:
    """Do the same as `attention.decode.decode_splits` of what is supported.

    Several splits are not merged; with one, long rows may be divided all the same, but for such as share
    `prefixes`: cascade_of, lens, and partials and lse of the workspace, or all None. See READY for `ready`.
    stages: see `stages_of`. sparing: see `attention.splits.tiles_of_split`.
    """
    num_q_heads, head_dim = q.shape[1:]
    dim = triton.next_power_of_2(head_dim)
    num_kv_heads, block_size, planes = cache.kv_heads, cache.block_size, cache.format.planes > 0
    heads = (layer.rope, layer.q_norm, layer.k_norm, layer.eps) if new else (None, None, None, 0.0)
    kv = cache.kv.view(torch.int16) if planes else cache.kv  # words of planes
    count, merges = batch.rows.shape[0], splits == 1
    programs = num_kv_heads * programs_of_group(num_q_heads // num_kv_heads)
    division = Division(count if splits > 1 else 0, splits, count, 1)
    if merges and prefixes[0] is None:
        division = plan_division(count, programs, dim, gpu_of(q.device).multiprocessors, workspace)
    decode_kernel[programs, division.programs(count)](
        out, workspace.partials, workspace.lse, workspace.arrivals, q, kv, batch.block_tables, batch.rows,
        batch.context_lens, batch.order, *prefixes, *division, division.most, layer.scale * LOG2_E,
        layer.window, q.stride(0), batch.block_tables.stride(0), *kv.stride()[:3], *words(cache.scales),
        *heads,
        GROUP=num_q_heads // num_kv_heads, BLOCK_SIZE=block_size, HEAD_DIM=head_dim, DIM=dim, TILE=TILE,
        STAGES=stages, PLANES=planes, NEW=new, READY=ready, BESIDE=beside, MERGES=merges, SPARING=sparing,
        BRINGS=count * programs <= BRINGS_UP_TO,
        num_warps=WARPS.value, launch_pdl=True,
    )  # fmt: skip
