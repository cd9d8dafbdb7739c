"""Attention of a layer of latents in a step, from projections to what was attended.

As `attention.attend` has it, but qkv [T, (Hq + 1) D] are queries, then the token's latent, all as they are to
be; returned is [T, Hq Dv].
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.attention.attend import room_for
from quire.kernels.attention.batch import AttentionLayer, ForwardBatch, of_newest
from quire.kernels.attention.latent.decode import decode_latents
from quire.kernels.attention.latent.prefill import prefill_latents
from quire.kernels.attention.latent.write import write_latents
from quire.kernels.formats.layer_cache import LayerCache


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
