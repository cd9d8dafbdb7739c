"""Paged attention with one query per sequence: split-KV decode."""

from __future__ import annotations

from enum import Enum

import torch
import triton
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, DecodeBatch
from quire.kernels.attention.cascade import prefix_attention
from quire.kernels.attention.decode_kernel import decode_kernel
from quire.kernels.attention.hopper_decode import decode as hopper
from quire.kernels.attention.key_tiles import KeyTiles, key_tiles
from quire.kernels.attention.kv_tile import LOG2_E, check_attention_inputs, tile_keys
from quire.kernels.attention.splits import (
    DecodeWorkspace,
    Sparing,
    SplitPartials,
    merge_splits,
    most_tiles,
    plan_hopper_splits,
    plan_splits,
    spares_room,
)
from quire.kernels.formats.kv_format import FP8, KVFormat
from quire.kernels.formats.kv_scales import words
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.launch import dependent_launch

STAGES = 4
# Of so many programs a third on each multiprocessor helps more than a fourth stage. On Hopper they are those
# of fp8 caches, and what else `attention.hopper_decode.decode` does not take.
FULL_STAGES = 3
MANY_PROGRAMS = 768
# With these a program takes less than 48 KiB of shared memory, if heads are of 128 in 16 bits. One that takes
# more is given another division of L1 cache and shared memory than kernels with little of it, and a
# multiprocessor changes that only once it is idle: this kernel would not begin before the one ahead has
# ended, 22.1 against 19.5 µs a layer of one token of Qwen3-0.6B on an H100.
SMALL_STAGES = 2
# With so many splits the first tile is a large part of what a program reads: it goes to registers while the
# projection runs, 18.3 against 19.5 µs. With fewer the L2 cache is asked for the first two, and all tiles go
# through the loop: 28.3 against 29.7 µs of 8 rows. Of a window with no more tiles than splits it is all.
FIRST_SPLITS = 16
EARLY = 2


class DecodeKernel(Enum):
    """The kernel that attends from decode tokens."""

    HOPPER = "attention.hopper_decode"
    SPLIT = "attention.decode_kernel"
    # Programs of split rows take no more shared memory than kernels that use it for little else than to
    # exchange sums: behind one of these they begin sooner.
    HOPPER_SMALL = "attention.hopper_decode in little shared memory"
    SPLIT_SMALL = "attention.decode_kernel in little shared memory"


class DecodeMode(Enum):
    """Where the newest tokens' keys and values come from, and what may be read before kernels ahead end."""

    AFTER = "after"  # kernels ahead write the cache: nothing of it is read before they have ended
    KNOWN = "known"  # the kernel just ahead writes the newest tokens'; the others were there before it began
    BESIDE = "beside"  # all are there, and the kernel just ahead, which leaves them alone, may still run
    NEW = "new"  # the newest tokens' heads follow the queries, as the projection gave them


def decode_tiles(gpu: Gpu, lanes: int, dim: int, dtype: torch.dtype, held: KVFormat) -> KeyTiles:
    """Return the tiles of `attention.decode_kernel` of `lanes` query heads of dim, both powers of two."""
    keys, paired = tile_keys(dim, dtype.itemsize), False
    if held == FP8 and dtype.itemsize == 2:
        keys, paired = 2 * keys, True  # in as many bytes
    return key_tiles(gpu, KeyTiles(keys, STAGES), lanes, dim, dtype, held, paired=paired)


def has_room_for_new_heads(gpu: Gpu, group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Tell whether programs that normalise and rotate `group` query heads fit: those are held twice then."""
    lanes, dim = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(head_dim)
    return bool(2 * lanes * dim * dtype.itemsize < gpu.shared_memory)


def decode(
    q: Tensor,
    out: Tensor,
    batch: DecodeBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    mode: DecodeMode = DecodeMode.AFTER,
    splits: int | None = None,
    *,
    by: DecodeKernel | None = None,
) -> None:
    """Attend from each row's newest token to its context, to the first B tokens of `out` [T, Hq, D].

    As `decode_splits`, whose partial results, if any, are merged.
    """
    partials = decode_splits(q, out, batch, layer, cache, mode, splits, by=by)
    if partials is not None:
        merge_splits(partials)


def decode_splits(
    q: Tensor,
    out: Tensor,
    batch: DecodeBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    mode: DecodeMode = DecodeMode.AFTER,
    splits: int | None = None,
    *,
    by: DecodeKernel | None = None,
    sparing: Sparing | None = None,
) -> SplitPartials | None:
    """Attend from each row's newest token to its context; return what is still to be merged, if rows split.

    q [T, Hq, D]: its first B tokens are the rows' queries. `out` [T, Hq, D] gets their results in its first B
    tokens, unless partial results are returned; a row without context writes nothing. Grid and launches
    depend on shapes only, so CUDA graphs may capture it. `splits` overrides what is planned; with one,
    `attention.hopper_decode` may divide long rows all the same, by the workspace, and merges them itself,
    unless rows share. What the rows share is read once for all of them, without a window or slopes. In fp8 q
    must fit fp16.

    NEW: a token's query heads are followed by its Hkv heads of k and of v, all as the projection gave them:
    they are normalised and rotated here, and K and V written to the cache. Not for rows that share, nor for
    formats that decode attention does not write.

    BESIDE: the kernel just ahead must be one that began only when all before it had ended (no dependent
    launch), and must leave q, K, V and `out`'s first B tokens alone, as prefill attention of the same step:
    the two run side by side. Not for rows that share.

    by: the kernel; None is `attention.hopper_decode` where that can be, else `attention.decode_kernel`.
    sparing: see `splits.tiles_of_split`; None may become room.
    """
    check_attention_inputs(q, out, cache)
    workspace, shared, new = batch.workspace, batch.shared, mode is DecodeMode.NEW
    assert isinstance(workspace, DecodeWorkspace)
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = cache.kv_heads, cache.block_size
    count, kv, held = batch.rows.shape[0], cache.kv, cache.format
    if new and (shared is not None or not held.written_by_decode):
        raise ValueError(f"new heads are for rows that share no prefixes, and not for a cache in {held.name}")
    if mode is DecodeMode.BESIDE and shared is not None:
        raise ValueError("beside a prefill, rows share no prefixes")
    if new and len(q) > 1 and q.stride(0) < (num_q_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"new heads need k and v beside q: a token of {num_q_heads} + 2 · {num_kv_heads} heads, but the "
            f"stride is {q.stride(0)}"
        )
    if count == 0:
        return None
    group = num_q_heads // num_kv_heads
    dim = triton.next_power_of_2(head_dim)
    lanes = max(16, triton.next_power_of_2(group))
    gpu = gpu_of(q.device)
    if by is None:
        takes = hopper.supports(gpu, q.dtype, held, head_dim, group, block_size)
        takes = takes and layer.plain and kv.stride(3) == kv.shape[-1]
        by = DecodeKernel.HOPPER if takes else DecodeKernel.SPLIT
    tiles = decode_tiles(gpu, lanes, dim, q.dtype, held)
    by_hopper = by in (DecodeKernel.HOPPER, DecodeKernel.HOPPER_SMALL)
    tile = hopper.TILE if by_hopper else tiles.keys
    max_tiles = most_tiles(batch.block_tables.shape[1] * block_size, layer.window, tile)
    prefixes: tuple[Tensor | None, ...] = (None, None, None, None)
    if shared is not None and layer.window == 0 and layer.slopes is None:
        splits = 1  # what is left of such a batch is short
        prefix_attention(
            q, cache, batch.block_tables, batch.rows, shared, layer.scale, workspace.prefix, layer.softcap
        )
        prefixes = (shared.cascade_of, shared.lens, workspace.prefix.partials, workspace.prefix.lse)
    elif splits is None and by_hopper:
        programs = num_kv_heads * hopper.programs_of_group(group)
        splits = plan_hopper_splits(count, programs, dim, max_tiles)
    elif splits is None:
        splits = plan_splits(count, num_kv_heads, max_tiles)
    if (
        by_hopper
        and sparing is None
        and spares_room(count, num_kv_heads * hopper.programs_of_group(group), dim, splits)
    ):
        sparing = "room"
    if splits > 1 and count * splits * num_q_heads > workspace.lse.numel():
        raise ValueError(
            f"{count} rows × {splits} splits × {num_q_heads} heads exceed the workspace's "
            f"{workspace.lse.numel()} partial results; allocate it for the largest batch"
        )
    beside = mode is DecodeMode.BESIDE
    if by_hopper:
        programs = count * num_kv_heads * hopper.programs_of_group(group) * splits
        stages = hopper.stages_of(gpu, dim, programs, small=by is DecodeKernel.HOPPER_SMALL)
        ready = {DecodeMode.AFTER: 0, DecodeMode.KNOWN: 1}.get(mode, 2)
        hopper.hopper_decode(
            q, out, batch, layer, cache, workspace, splits, prefixes, ready, stages,
            new=new, beside=beside, sparing=sparing,
        )  # fmt: skip
    else:
        launch = dependent_launch(q.device)
        heads = (layer.rope, layer.q_norm, layer.k_norm, layer.eps) if new else (None, None, None, 0.0)
        of_one_tile = layer.window > 0 and 1 < max_tiles <= splits
        first = new and (splits >= FIRST_SPLITS or of_one_tile) and tiles.stages >= SMALL_STAGES
        early, stages = 0 if first or beside else EARLY, tiles.stages
        if first or (by is DecodeKernel.SPLIT_SMALL and splits > 1):
            stages = min(SMALL_STAGES, stages)
        elif not beside and num_kv_heads * count >= MANY_PROGRAMS:
            early, stages = 1, min(FULL_STAGES, stages)
        decode_kernel[num_kv_heads, count, splits](
            out, workspace.partials, workspace.lse, q, kv, batch.block_tables, batch.rows, batch.context_lens,
            batch.order, *prefixes, layer.scale * LOG2_E, layer.window, layer.softcap * LOG2_E or None,
            layer.sinks, layer.slopes, q.stride(0), batch.block_tables.stride(0), *kv.stride()[:4],
            *words(cache.scales), *heads,
            GROUP=group, BLOCK_M=lanes, BLOCK_SIZE=block_size, HEAD_DIM=head_dim, DIM=dim, TILE=tile,
            PLANES=bool(held.planes), CHUNKED=layer.chunked, SPARING=sparing, NEW=new, FIRST=first,
            EARLY=early, BESIDE=beside and launch["DEPENDENT"], num_warps=4, num_stages=stages, **launch,
        )  # fmt: skip
    if splits == 1:
        return None
    return SplitPartials(
        out, batch.context_lens, layer.window, splits, tile, workspace, layer.chunked, sparing
    )
