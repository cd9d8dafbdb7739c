"""Paged attention with one query per sequence: split-KV decode."""

from __future__ import annotations

import torch
import triton

from quire.kernels.attention.cascade import SharedPrefixes, prefix_attention
from quire.kernels.attention.decode_kernel import decode_kernel
from quire.kernels.attention.hopper_decode.decode import TILE as HOPPER_TILE
from quire.kernels.attention.hopper_decode.decode import hopper_decode, suits_hopper_decode
from quire.kernels.attention.key_tiles import KeyTiles, key_tiles
from quire.kernels.attention.kv_tile import LOG2_E, check_attention_inputs, tile_keys
from quire.kernels.attention.qk_norm_rope import NewHeads
from quire.kernels.attention.splits import DecodeWorkspace, Merge, merge_splits, plan_splits
from quire.kernels.formats.fp8 import DTYPE as FP8
from quire.kernels.formats.kv_format import check_kv_scales
from quire.kernels.formats.kv_scales import words
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
# through the loop: 28.3 against 29.7 µs of 8 rows.
FIRST_SPLITS = 16
EARLY = 2


def decode_tiles(gpu: Gpu, lanes: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> KeyTiles:
    """Return the tiles of `attention.decode_kernel` of `lanes` query heads of dim, both powers of two."""
    keys, paired = tile_keys(dim, dtype.itemsize), False
    if kv_dtype == FP8 and dtype.itemsize == 2:
        keys, paired = 2 * keys, True  # in as many bytes
    return key_tiles(gpu, KeyTiles(keys, STAGES), lanes, dim, dtype, kv_dtype, paired=paired)


def has_room_for_new_heads(gpu: Gpu, group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Tell whether programs that normalise and rotate `group` query heads fit: those are held twice then."""
    lanes, dim = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(head_dim)
    return bool(2 * lanes * dim * dtype.itemsize < gpu.shared_memory)


def decode_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    order: torch.Tensor,
    scale: float,
    window: int,
    workspace: DecodeWorkspace,
    max_splits: int | None = None,
    shared: SharedPrefixes | None = None,
    kv_scales: torch.Tensor | None = None,
    new: NewHeads | None = None,
    beside: bool = False,
    known: bool = False,
    small: bool = False,
    merge: Merge = merge_splits,
) -> None:
    """Attention of each row's newest token to its context, to the first B tokens of `out` [T, Hq, D].

    q [T, Hq, D]: its first B tokens are the rows' queries, at position context_len − 1 each. kv [blocks,
    2, Hkv, block_size, D], block_tables [*, max_blocks] i32 indexed by rows [B] i32, context_lens [B]
    i32: a row without context writes nothing. order [B] i32 is a permutation of 0 … B − 1, best by
    falling context length: a long row that starts last keeps the device waiting, and of many rows only
    the first three eighths may be divided for being long. These four are read before kernels ahead have
    ended: they must be complete when the kernel just ahead begins. `window` limits attention to that many
    newest keys, 0 means all. Grid and launches depend on shapes only, so CUDA graphs may capture it.
    `max_splits` overrides `plan_splits`. Where rows are split, the results are left in the workspace, and
    `merge` makes of them what becomes of `out`; with one, `attention.hopper_decode.decode` may divide long
    rows all the same, by the workspace, and merges them itself, unless rows share. What the rows `shared`
    with others is read once for all of them (read as early; no use with a window). kv_scales [blocks, Hkv,
    block_size, 2] are those of a rounded kv (see `formats.kv_format`), and in fp8 q must fit fp16.

    With `new`, a token's query heads are followed by its Hkv heads of k and of v, all as the projection gave
    them: they are normalised and rotated here, and K and V written to the cache. What that held is read as
    early, too. Not together with `shared` or a cache in fp8.

    With `beside`, the kernel just ahead must be one that began only when all before it had ended (no
    dependent launch), and must leave q, K, V and `out`'s first B tokens alone, as prefill attention of the
    same step: the two run side by side. Not together with `shared` or `new`.

    With `known`, the cache held all but the rows' newest tokens before the kernel just ahead began, and is
    read as early.

    With `small`, programs of split rows take no more shared memory than kernels that use it for little else
    than to exchange sums: behind one of these they begin sooner. Otherwise rows are attended to by
    `attention.hopper_decode.decode` where that can be.
    """
    check_attention_inputs(q, out, kv)
    check_kv_scales(kv, kv_scales)
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv.shape[2:4]
    batch = rows.shape[0]
    if new is not None and (shared is not None or kv.dtype == FP8):
        raise ValueError("new heads are for rows that share no prefixes, and not for a cache in fp8")
    if beside and (shared is not None or new is not None):
        raise ValueError("beside a prefill, rows share no prefixes, and the cache has their newest tokens")
    if new is not None and len(q) > 1 and q.stride(0) < (num_q_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"new heads need k and v beside q: a token of {num_q_heads} + 2 · {num_kv_heads} heads, but the "
            f"stride is {q.stride(0)}"
        )
    if batch == 0:
        return
    group = num_q_heads // num_kv_heads
    dim = triton.next_power_of_2(head_dim)
    lanes = max(16, triton.next_power_of_2(group))
    by_hopper = not small and suits_hopper_decode(q, kv)
    tiles = decode_tiles(gpu_of(q.device), lanes, dim, q.dtype, kv.dtype)
    tile = HOPPER_TILE if by_hopper else tiles.keys
    max_tiles = triton.cdiv(block_tables.shape[1] * block_size, tile)
    prefixes: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    if shared is not None and window == 0:
        max_splits = 1  # what is left of such a batch is short
        prefix_attention(q, kv, block_tables, rows, shared, scale, workspace.prefix, kv_scales)
        prefixes = (shared.bundle_of, shared.lens, workspace.prefix.partials, workspace.prefix.lse)
    else:
        max_splits = max_splits or plan_splits(batch, num_kv_heads, max_tiles)
    if max_splits > 1 and batch * max_splits * num_q_heads > workspace.lse.numel():
        raise ValueError(
            f"{batch} rows × {max_splits} splits × {num_q_heads} heads exceed the workspace's "
            f"{workspace.lse.numel()} partial results; allocate it for the largest batch"
        )
    if by_hopper:
        ready = 2 if beside or new is not None else int(known)
        hopper_decode(
            q, out, kv, block_tables, rows, context_lens, order, scale, window, workspace, max_splits,
            prefixes, new, kv_scales, ready, beside,
        )  # fmt: skip
    else:
        launch = dependent_launch(q.device)
        heads = (None, None, None, 0.0) if new is None else (new.rope, new.q_norm, new.k_norm, new.eps)
        first = new is not None and max_splits >= FIRST_SPLITS and tiles.stages >= SMALL_STAGES
        early, stages = 0 if first or beside else EARLY, tiles.stages
        if first or (small and max_splits > 1):
            stages = min(SMALL_STAGES, stages)
        elif not beside and num_kv_heads * batch >= MANY_PROGRAMS:
            early, stages = 1, min(FULL_STAGES, stages)
        decode_kernel[num_kv_heads, batch, max_splits](
            out, workspace.partials, workspace.lse, q, kv, block_tables, rows, context_lens, order,
            *prefixes, scale * LOG2_E, window,
            q.stride(0), block_tables.stride(0), *kv.stride()[:4], *words(kv_scales), *heads,
            GROUP=group, BLOCK_M=lanes, BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim, DIM=dim, TILE=tile, NEW=new is not None, FIRST=first, EARLY=early,
            BESIDE=beside and launch["DEPENDENT"], num_warps=4, num_stages=stages, **launch,
        )  # fmt: skip
    if max_splits > 1:
        merge(out, context_lens, window, max_splits, tile, workspace)
