"""Attention of a layer in a step: from the fused projection to what was attended, by each way of it.

Each function takes qkv [T, (Hq + 2 Hkv) D], the step, the layer and its cache; it writes K and V to the
cache, may overwrite q, and returns [T, Hq D], or what is still to be merged to that; see `attention.recipes`.
The references take latents as well, see `attention.latent.attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, ForwardBatch, of_newest
from quire.kernels.attention.decode import DecodeKernel, DecodeMode, decode, decode_splits
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.prefill import PrefillKernel, prefill, prefill_reference
from quire.kernels.attention.splits import SplitPartials
from quire.kernels.attention.write_kv import write_kv, write_kv_reference
from quire.kernels.formats.layer_cache import LayerCache

Attend: TypeAlias = Callable[[Tensor, ForwardBatch, AttentionLayer, LayerCache], "Tensor | SplitPartials"]


def attend_newest(
    qkv: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache, decode_by: DecodeKernel
) -> Tensor:
    """Write all K and V, but attend from the R newest tokens alone -> [R, Hq D]."""
    assert batch.newest is not None
    write_kv(qkv, batch.positions, batch.slots, layer, cache)
    q = of_newest(layer.queries(qkv), batch.newest)
    out = torch.empty_like(q)
    decode(q, out, batch.newest.queries, layer, cache, by=decode_by)
    return out.flatten(1)


def attend_unmerged(
    qkv: Tensor,
    batch: ForwardBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    decode_by: DecodeKernel,
    splits: int,
) -> Tensor | SplitPartials:
    """Write K and V and attend in one kernel; leave the merging of splits to the output projection."""
    out, q = room_for(qkv, layer), layer.queries(qkv)
    partials = decode_splits(
        q, out, batch.decode, layer, cache, DecodeMode.NEW, splits, by=decode_by, sparing="merging"
    )
    return out.flatten(1) if partials is None else partials


def attend_new(
    qkv: Tensor,
    batch: ForwardBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    decode_by: DecodeKernel,
    splits: int | None = None,
) -> Tensor:
    """Write K and V and attend in one kernel: of few rows, another one costs as much as what it does."""
    out = room_for(qkv, layer)
    decode(layer.queries(qkv), out, batch.decode, layer, cache, DecodeMode.NEW, splits, by=decode_by)
    return out.flatten(1)


def attend_known(
    qkv: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache, decode_by: DecodeKernel
) -> Tensor:
    """Write K and V, then attend; earlier tokens' are asked for meanwhile."""
    out = room_for(qkv, layer)
    write_kv(qkv, batch.positions, batch.slots, layer, cache)
    decode(layer.queries(qkv), out, batch.decode, layer, cache, DecodeMode.KNOWN, by=decode_by)
    return out.flatten(1)


def attend_mixed(
    qkv: Tensor,
    batch: ForwardBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    decode_by: DecodeKernel,
    prefill_by: PrefillKernel,
) -> Tensor:
    """Write K and V, then attend from chunks, and from decodes beside them."""
    assert batch.prefill is not None
    out, q = room_for(qkv, layer), layer.queries(qkv)
    write_kv(qkv, batch.positions, batch.slots, layer, cache, dequantize=True)
    prefill(q, out, batch.prefill, layer, cache, by=prefill_by)
    if len(batch.decode.rows):
        mode = DecodeMode.BESIDE if len(batch.prefill.rows) else DecodeMode.AFTER
        decode(q, out, batch.decode, layer, cache, mode, by=decode_by)
    return out.flatten(1)


def attend_newest_reference(
    qkv: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache
) -> Tensor:
    """Do the same as `attend_newest` in plain torch."""
    assert batch.newest is not None
    write_kv_reference(qkv, batch.positions, batch.slots, layer, cache)
    q = of_newest(layer.queries(qkv), batch.newest)
    out = room_for(q, layer)
    decode_reference(q, out, batch.newest.queries, layer, cache)
    return out.flatten(1)


def attend_reference(qkv: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache) -> Tensor:
    """Do the same as the others in plain torch, from all tokens."""
    out, q = room_for(qkv, layer), layer.queries(qkv)
    write_kv_reference(qkv, batch.positions, batch.slots, layer, cache, dequantize=batch.prefill is not None)
    if batch.prefill is not None:
        prefill_reference(q, out, batch.prefill, layer, cache)
    if len(batch.decode.rows):
        decode_reference(q, out, batch.decode, layer, cache)
    return out.flatten(1)


def room_for(qkv: Tensor, layer: AttentionLayer) -> Tensor:
    """Return memory for what is attended [T, Hq, Dv]."""
    return torch.empty(len(qkv), layer.num_heads, layer.value_dim, dtype=qkv.dtype, device=qkv.device)
