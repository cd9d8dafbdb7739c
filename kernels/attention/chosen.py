"""Attention to chosen tokens alone: what is kept of them is brought together, and attended to as a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention.attend import Attend
from quire.kernels.attention.batch import AttentionLayer, DecodeBatch, ForwardBatch, PrefillBatch
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.operations import whole
from quire.kernels.shapes import StepShape

MOST_BYTES = 1 << 28  # of keys and values that are brought together at once, or those of one token


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens of its row that each token of a step attends to.

    positions [T, K], K ≥ most: the first `most` of a token that sees more. Of one that does not they say
    nothing: it attends to all that it sees.
    """

    positions: Tensor
    most: int


def attend_to_chosen(
    qkv: Tensor,
    batch: ForwardBatch,
    rows: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    chosen: Chosen,
    plan: Callable[[StepShape], Attend],
) -> Tensor:
    """Write the keys and values of all tokens, and attend to those chosen -> [T, Hq Dv].

    rows [T]: each token's block table. plan: gives what attends in a step of such sizes, to a cache of the
    layer's.
    """
    size = cache.block_size
    out = write_alone(qkv, batch, layer, cache, plan)
    numbers = cache.kv.shape[1] * cache.kv_heads * cache.head_dim
    picked = F.pad(chosen.positions, (0, -chosen.positions.shape[1] % size))
    at_once = max(MOST_BYTES // (picked.shape[1] * numbers * cache.kv.element_size()), 1)
    for begin in range(0, len(qkv), at_once):
        part = slice(begin, begin + at_once)
        seen = batch.positions[part] + 1
        counts = seen.clamp(max=chosen.most)
        first = torch.arange(picked.shape[1], device=picked.device)
        positions = torch.where((seen > chosen.most)[:, None], picked[part], first)
        brought = _brought(cache, batch.decode.block_tables, rows[part], positions, counts)
        step = step_of_rows(batch, part, counts, picked.shape[1] // size, latent=bool(cache.latent))
        out[part] = whole(plan(step.shape(size))(qkv[part], step, layer, brought))
    return out


def write_alone(
    qkv: Tensor,
    batch: ForwardBatch,
    layer: AttentionLayer,
    cache: LayerCache,
    plan: Callable[[StepShape], Attend],
) -> Tensor:
    """Write the keys and values of all tokens, of which none attends to any yet -> room for [T, Hq Dv]."""
    none = batch.decode.rows[:0]
    decode = replace(batch.decode, rows=none, context_lens=none, order=none, shared=None)
    nobody = PrefillBatch(decode.block_tables, none, none.new_zeros(1), none, 1)
    writing = replace(batch, decode=decode, prefill=nobody, newest=None)
    return whole(plan(writing.shape(cache.block_size))(qkv, writing, layer, cache))


def _brought(
    cache: LayerCache, tables: Tensor, rows: Tensor, positions: Tensor, counts: Tensor
) -> LayerCache:
    """Return a cache in which each token has blocks of its own, with what is kept at its first positions."""
    size = cache.block_size
    known = torch.arange(positions.shape[1], device=positions.device) < counts[:, None]
    places = positions.long() * known
    blocks = tables[rows[:, None], places // size].long() * known
    kept = cache.kv.permute(0, 3, 1, 2, 4)[blocks, places % size]  # [tokens, K, 2 or 1, Hkv, D]
    kv = kept.flatten(0, 1).unflatten(0, (-1, size)).permute(0, 2, 3, 1, 4).contiguous()
    return replace(cache, kv=kv, index=None)


def step_of_rows(
    batch: ForwardBatch, part: slice, counts: Tensor, blocks: int, *, latent: bool
) -> ForwardBatch:
    """Return a step of some tokens, each of as many rows of its own as it has counts, that writes nothing.

    counts: of what each row sees, in so many blocks. To latents they attend as decodes; those to heads may be
    given their newest key by a kernel that writes it, so there they are prompts of one token, which read all
    that they see.
    """
    count = len(counts)
    of_token = count // len(batch.positions[part])
    rows = torch.arange(count, dtype=torch.int32, device=counts.device)
    tables = torch.arange(count * blocks, dtype=torch.int32, device=counts.device).view(count, blocks)
    workspace = batch.decode.workspace
    if isinstance(workspace, DecodeGather):  # which knows the rows of the step
        workspace = DecodeGather()
    decodes = slice(None) if latent else slice(0)
    prefill = None
    if not latent:
        starts = torch.arange(count + 1, dtype=torch.int32, device=counts.device)
        prefill = PrefillBatch(tables, rows, starts, counts, 1)
    return ForwardBatch(
        tokens=batch.tokens[part].repeat_interleave(of_token),
        positions=batch.positions[part].repeat_interleave(of_token),
        slots=torch.full_like(batch.slots[part], -1).repeat_interleave(of_token),
        decode=DecodeBatch(tables, rows[decodes], counts[decodes], rows[decodes], workspace),
        prefill=prefill,
    )
