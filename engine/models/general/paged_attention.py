"""Attention of transformers' modules over the paged cache."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.models.config import ModelConfig
from quire.engine.models.general.attention import Call
from quire.engine.models.general.division.heads import heads_of_rank
from quire.engine.models.general.division.modules import gathered
from quire.engine.models.layers import LayerPlans, layer_shapes
from quire.kernels.attention.batch import AttentionLayer, ForwardBatch
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.operations import whole
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.plan import plan_attention


class PagedAttention:
    """Attention of a step: writes a layer's keys and values to its cache, and attends over block tables."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks | None = None,
        splits: frozenset[int] = frozenset(),
    ) -> None:
        """ranks, splits: those that heads are divided among, and as `Division` has them."""
        self._in_call_order, self._calls = config.in_call_order, 0
        self._plans = LayerPlans(layer_shapes(config, dtype), device, plan_attention)
        self._shapes, self._ranks, self._splits = config.attention, ranks, splits
        self._layers = [
            AttentionLayer(
                each.heads,
                each.kv_heads,
                each.head_dim,
                each.scale,
                window,
                chunked=each.chunked and window > 0,
                latent=each.latent,
            )
            for each, window in zip(config.attention, config.windows, strict=True)
        ]

    def begin(self, batch: ForwardBatch, caches: list[LayerCache]) -> None:
        """Take a step's tokens; every layer computes all of them."""
        self._batches, self._caches = batch.by_layer(len(self._layers)), caches
        self._chosen, self._calls = self._plans.of(batch, caches), 0

    def _place(self, layer: int) -> int:
        """Return which of the caches a call is of."""
        self._calls += 1
        return self._calls - 1 if self._in_call_order else layer

    def __call__(self, layer: int, call: Call) -> Tensor:
        layer = self._place(layer)
        if self._ranks is None:
            return self._attended(layer, call)
        own, is_whole = heads_of_rank(call, self._shapes[layer], self._ranks)
        out = self._attended(layer, own)
        if not is_whole or layer in self._splits:
            return out
        return gathered(out.flatten(2), self._ranks).unflatten(2, (-1, out.shape[-1]))

    def attend(self, layer: int, qkv: Tensor, attention: AttentionLayer) -> Tensor:
        layer = self._place(layer)
        return whole(self._chosen[layer].run(qkv, self._batches[layer], attention, self._caches[layer]))

    def _attended(self, layer: int, call: Call) -> Tensor:
        attention = self._layers[layer]
        if not call.plain:
            attention = replace(attention, softcap=call.softcap, sinks=call.sinks, slopes=call.slopes)
        kept = (call.k,) if call.latent is not None else (call.k, call.v)
        parts = [_filled(part, attention.head_dim) for part in (call.q, *kept)]
        qkv = torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1)
        out = self._chosen[layer].run(qkv, self._batches[layer], attention, self._caches[layer])
        heads, tokens, _ = call.q.shape
        return whole(out).view(1, tokens, heads, attention.value_dim)[..., : call.v.shape[-1]]


def _filled(heads: Tensor, head_dim: int) -> Tensor:
    """Return heads [H, T, D] with zeros behind their D numbers, which change neither scores nor sums."""
    missing = head_dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads
