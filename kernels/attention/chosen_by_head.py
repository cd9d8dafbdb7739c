"""Attention to tokens that each KV head chooses for itself: every head is attended to as a row of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention.attend import Attend
from quire.kernels.attention.batch import AttentionLayer, ForwardBatch
from quire.kernels.attention.chosen import MOST_BYTES, step_of_rows, write_alone
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.operations import whole
from quire.kernels.shapes import StepShape


@dataclass(frozen=True, slots=True)
class ChosenByHead:
    """Tokens of its row that each token of a step attends to, by KV head.

    positions [T, Hkv, K]: of each the first counts [T, Hkv]. Of a token that sees no more than `most` they
    say nothing: it attends to all that it sees.
    """

    positions: Tensor
    counts: Tensor
    most: int

    def repeated(self, copies: int) -> ChosenByHead:
        """Return what so many copies of each KV head choose."""
        positions, counts = (each.repeat_interleave(copies, 1) for each in (self.positions, self.counts))
        return replace(self, positions=positions, counts=counts)

    def of_heads(self, take: Callable[[Tensor], Tensor]) -> ChosenByHead:
        """Return what some of the KV heads choose. take: gives these of what has heads first."""
        positions, counts = (take(each.movedim(1, 0)).movedim(0, 1) for each in (self.positions, self.counts))
        return replace(self, positions=positions, counts=counts)


def attend_to_chosen_by_head(
    qkv: Tensor,
    batch: ForwardBatch,
    rows: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    chosen: ChosenByHead,
    plan: Callable[[StepShape], Attend],
    plan_of_head: Callable[[StepShape], Attend],
) -> Tensor:
    """Do as `chosen.attend_to_chosen` does. plan_of_head: gives what attends to a cache of one KV head.

    Raises ValueError for sinks and slopes, which each query head has for itself.
    """
    if layer.sinks is not None or layer.slopes is not None:
        raise ValueError("heads that choose tokens for themselves are attended to without sinks and slopes")
    size, heads = cache.block_size, layer.num_kv_heads
    out = write_alone(qkv, batch, layer, cache, plan)
    of_head = replace(layer, num_heads=layer.num_heads // heads, num_kv_heads=1)
    by_head = _by_head(qkv, heads, layer.head_dim)
    picked = F.pad(chosen.positions, (0, -chosen.positions.shape[2] % size))
    first = torch.arange(picked.shape[2], device=picked.device)
    numbers = 2 * heads * picked.shape[2] * cache.head_dim
    at_once = max(MOST_BYTES // (numbers * cache.kv.element_size()), 1)
    for begin in range(0, len(qkv), at_once):
        part = slice(begin, begin + at_once)
        seen = (batch.positions[part] + 1)[:, None]
        counts = torch.where(seen > chosen.most, chosen.counts[part], seen).int()
        positions = torch.where((seen > chosen.most)[..., None], picked[part], first)
        brought = _brought(cache, batch.decode.block_tables[rows[part]], positions, counts)
        step = step_of_rows(batch, part, counts.flatten(), picked.shape[2] // size, latent=False)
        mine = by_head[part].flatten(0, 1)
        attended = whole(plan_of_head(step.shape(size))(mine, step, of_head, brought))
        out[part] = attended.view(len(counts), -1)
    return out


def _by_head(qkv: Tensor, heads: int, head_dim: int) -> Tensor:
    """Return a projection [T, (Hq + 2 Hkv) D] as one of each KV head [T, Hkv, (Hq / Hkv + 2) D]."""
    kv = heads * head_dim
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv, kv, kv), dim=1)
    return torch.cat([part.unflatten(1, (heads, -1)) for part in (q, k, v)], dim=2)


def _brought(cache: LayerCache, tables: Tensor, positions: Tensor, counts: Tensor) -> LayerCache:
    """Return a cache of one KV head: each head of a token has blocks of its own, with what it chose."""
    size = cache.block_size
    known = torch.arange(positions.shape[2], device=positions.device) < counts[..., None]
    places = (positions * known).long()
    blocks = tables.gather(1, (places // size).flatten(1)).view_as(places).long() * known
    head = torch.arange(positions.shape[1], device=positions.device)[:, None]
    kept = cache.kv.permute(0, 3, 2, 1, 4)[blocks, places % size, head]  # [tokens, Hkv, K, 2, D]
    kv = kept.flatten(0, 2).unflatten(0, (-1, size)).permute(0, 2, 1, 3)[:, :, None].contiguous()
    return replace(cache, kv=kv, index=None)
