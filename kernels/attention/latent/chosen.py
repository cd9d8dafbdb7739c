"""Attention to chosen latents where they are: a token's choice is a table of blocks of one token each."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.attend import room_for
from quire.kernels.attention.batch import AttentionLayer, DecodeBatch, ForwardBatch
from quire.kernels.attention.chosen import Chosen
from quire.kernels.attention.latent.decode import decode_latents
from quire.kernels.attention.latent.tile import MOST_KEYS, MOST_LANES
from quire.kernels.attention.latent.write import write_latents
from quire.kernels.attention.splits import MAX_SPLITS
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import gpu_of

BLOCK = 512  # entries of a program
# To merge a part of a head takes so much of what a tile takes: of 128 heads 0.31 µs, and 3.6 µs on an H100.
MERGE_COST = 0.31 / 128 / 3.6


def attend_to_chosen_latents(
    qkv: Tensor, batch: ForwardBatch, rows: Tensor, layer: AttentionLayer, cache: LayerCache, chosen: Chosen
) -> Tensor:
    """Write the latents of all tokens, and attend to those chosen -> [T, Hq Dv].

    rows [T]: each token's block table.
    """
    width = layer.num_heads * layer.head_dim
    write_latents(qkv[:, width:], batch.slots, cache)
    out = room_for(qkv, layer)
    tokens = _as_tokens(cache)
    tables, counts = _tables(batch, rows, cache, tokens.kv.stride(0), chosen)
    each = torch.arange(len(qkv), dtype=torch.int32, device=qkv.device)
    step = DecodeBatch(tables, each, counts, each, batch.decode.workspace)
    splits = choice_splits(len(qkv), layer.num_heads, chosen.most, gpu_of(qkv.device).multiprocessors)
    decode_latents(layer.queries(qkv), out, step, layer, tokens, splits)
    return out.flatten(1)


@lru_cache(maxsize=4096)  # steps have any number of tokens
def choice_splits(tokens: int, heads: int, most: int, multiprocessors: int) -> int | None:
    """Return into how many parts choices are divided; None: as other contexts are, for one token.

    All are equally long, if any is: no part has to be spare for a long one. A multiprocessor has room for one
    program, and what merges parts reads each.
    """
    programs, tiles = tokens * triton.cdiv(heads, MOST_LANES), triton.cdiv(most, MOST_KEYS)
    if tokens <= 1:
        return None

    def cost(splits: int) -> float:
        rounds = triton.cdiv(programs * splits, multiprocessors)
        merging = tokens * heads * splits * MERGE_COST if splits > 1 else 0.0
        return rounds * triton.cdiv(tiles, splits) + merging

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=cost)


def _as_tokens(cache: LayerCache) -> LayerCache:
    """View a cache as blocks of a token, which begin at all places where one may."""
    kv = cache.kv
    block, slot = kv.stride(0), kv.stride(3)
    unit = gcd(block, slot)
    last = ((kv.shape[0] - 1) * block + (kv.shape[3] - 1) * slot) // unit
    if last >= 2**31:
        raise ValueError(f"a cache of {last} places of {unit} numbers has more than 32 bits count")
    tokens = kv.as_strided((last + 1, 1, 1, 1, kv.shape[4]), (unit, unit, unit, unit, 1))
    return replace(cache, kv=tokens, index=None)


def _tables(
    batch: ForwardBatch, rows: Tensor, cache: LayerCache, unit: int, chosen: Chosen
) -> tuple[Tensor, Tensor]:
    """Return where each token's chosen ones are [T, most] i32, in units, and how many they are [T] i32."""
    positions, kv = chosen.positions, cache.kv
    tables = torch.empty(len(positions), chosen.most, dtype=torch.int32, device=kv.device)
    counts = torch.empty(len(positions), dtype=torch.int32, device=kv.device)
    _tables_kernel[len(positions), triton.cdiv(chosen.most, BLOCK)](
        tables, counts, positions, batch.positions, rows, batch.decode.block_tables, chosen.most,
        positions.stride(0), batch.decode.block_tables.stride(0), kv.stride(0) // unit, kv.stride(3) // unit,
        BLOCK_SIZE=cache.block_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return tables, counts


@triton.jit(do_not_specialize=["most"])
def _tables_kernel(
    tables: tl.tensor,
    counts: tl.tensor,
    chosen: tl.tensor,
    positions: tl.tensor,
    rows: tl.tensor,
    block_tables: tl.tensor,
    most: tl.tensor,
    chosen_stride: tl.tensor,
    table_stride: tl.tensor,
    block_units: tl.tensor,
    slot_units: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Part of one token's table."""
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.maximum(tl.load(positions + token) + 1, 0)
    count = tl.minimum(seen, most)
    inside = entry < count
    position = entry
    if seen > most:
        position = tl.load(chosen + token * chosen_stride + entry, mask=inside, other=0).to(tl.int32)
    table = block_tables + tl.load(rows + token).to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0)
    place = block * block_units + position % BLOCK_SIZE * slot_units
    tl.store(tables + token * most + entry, place, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(counts + token, count)
