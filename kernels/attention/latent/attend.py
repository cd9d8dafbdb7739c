"""Attention of a layer of latents in a step, from projections to what was attended.

As `attention.attend` has it, but qkv [T, (Hq + 1) D] are queries, then the token's latent, all as they are to
be; returned is [T, Hq Dv].

Prompts may be attended to by expanded heads instead: for each query, key and head a product is then of as
many numbers as these have (192 and 128 in DeepSeek), and not of a latent (576 and 512). What expands a
token's latent would have gone to its query and to what it attended to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention.attend import room_for
from quire.kernels.attention.batch import AttentionLayer, DecodeBatch, ForwardBatch, PrefillBatch, of_newest
from quire.kernels.attention.latent.decode import decode_latents
from quire.kernels.attention.latent.earlier import Earlier
from quire.kernels.attention.latent.expanded import Expanded, attend_to_expanded, expanded_tiles
from quire.kernels.attention.latent.expansion import Expansion
from quire.kernels.attention.latent.prefill import prefill_latents
from quire.kernels.attention.latent.write import write_latents
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import Gpu


def attend_to_latents(qkv: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache) -> Tensor:
    """Write the latents, then attend from chunks, and from decodes beside them."""
    q = _write(qkv, batch, layer, cache)
    out = room_for(qkv, layer)
    if batch.prefill is not None:
        prefill_latents(q, out, batch.prefill, layer, cache)
    decode_latents(q, out, batch.decode, layer, cache)
    return out.flatten(1)


def attend_newest_to_latents(
    qkv: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache
) -> Tensor:
    """Write all latents, but attend from the R newest tokens alone -> [R, Hq Dv]."""
    assert batch.newest is not None
    q = of_newest(_write(qkv, batch, layer, cache), batch.newest)
    out = room_for(q, layer)
    decode_latents(q, out, batch.newest.queries, layer, cache)
    return out.flatten(1)


def takes_expanded(
    gpu: Gpu, batch: ForwardBatch, layer: AttentionLayer, expansion: Expansion, dtype: torch.dtype
) -> bool:
    """Tell whether `attend_by_expanding` takes a step, and is quicker."""
    rotated = layer.head_dim - expansion.latent
    return (
        gpu.has_kernels
        and batch.prefill is not None
        and batch.newest is None
        and layer.plain
        and not layer.window
        and expansion.plain + expansion.value < 2 * expansion.latent
        and expanded_tiles(gpu, expansion.plain, rotated, expansion.value, dtype) is not None
    )


def attend_by_expanding(
    q: Tensor,
    latents: Tensor,
    expansion: Expansion,
    batch: ForwardBatch,
    earlier: Earlier,
    layer: AttentionLayer,
    cache: LayerCache,
) -> Tensor:
    """Write latents [T, D], and attend from q [Hq, T, plain + rotated] -> [T, Hq, value].

    Chunks attend to their own tokens by expanded heads, and to those of `earlier` (`plan_earlier`) by such or
    as decodes do: to latents. What each gives is merged.
    """
    prefill, tokens, latent = batch.prefill, len(latents), layer.latent
    assert prefill is not None
    write_latents(latents, batch.slots, cache)
    out = latents.new_empty(tokens, layer.num_heads, expansion.value)
    lse = None
    if earlier.pieces or earlier.others is not None:
        lse = torch.full((tokens, layer.num_heads), float("-inf"), device=q.device)
    of_latents = tokens if earlier.others is not None else min(len(batch.decode.rows), tokens)
    if of_latents:  # decodes come first
        _attend_to_latents(
            q[:, :of_latents], out[:of_latents], lse, expansion, batch.decode, earlier.others, layer, cache
        )
    for piece in earlier.pieces:
        kept = cache.kv[piece.blocks, 0, 0, piece.places]
        keys = Expanded(expansion.expand(kept[:, :latent]), kept[:, latent:], piece.starts)
        attend_to_expanded(q, out, lse, keys, expansion, prefill.query_starts, layer)
        del keys  # before the next piece is made: there is memory for one
    own = Expanded(expansion.expand(latents[:, :latent]), latents[:, latent:])
    attend_to_expanded(q, out, lse, own, expansion, prefill.query_starts, layer)
    return out


def _attend_to_latents(
    q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    expansion: Expansion,
    decodes: DecodeBatch,
    chunks: PrefillBatch | None,
    layer: AttentionLayer,
    cache: LayerCache,
) -> None:
    """Attend from decodes, and from chunks to what was before them."""
    queries = q.new_empty(q.shape[1], layer.num_heads, layer.head_dim)
    expansion.queries(q, queries)
    attended = room_for(queries, layer)
    if chunks is not None:
        prefill_latents(queries, attended, chunks, layer, cache, lse)
    decode_latents(queries, attended, decodes, layer, cache)
    expansion.values(attended, out)


def _write(qkv: Tensor, batch: ForwardBatch, layer: AttentionLayer, cache: LayerCache) -> Tensor:
    """Write the step's latents; return its queries [T, Hq, D]."""
    width = layer.num_heads * layer.head_dim
    if qkv.shape[1] != width + layer.head_dim:
        raise ValueError(
            f"a projection has {qkv.shape[1]} columns, expected {layer.num_heads} heads of {layer.head_dim} "
            "and as many numbers of a latent"
        )
    write_latents(qkv[:, width:], batch.slots, cache)
    return layer.queries(qkv)
