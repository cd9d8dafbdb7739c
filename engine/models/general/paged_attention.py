"""Attention of transformers' modules over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.models.config import ModelConfig
from quire.engine.models.general.attention import EVERY, Call
from quire.engine.models.general.division.heads import heads_of_rank
from quire.engine.models.general.division.modules import gathered
from quire.engine.models.general.indexer import (
    Indexer,
    Piece,
    choose,
    choose_by_head,
    choose_by_scores,
    keep_keys,
    pieces,
)
from quire.engine.models.layers import LayerPlans, layer_shapes
from quire.kernels.attention.attend import Attend
from quire.kernels.attention.batch import AttentionLayer, ForwardBatch
from quire.kernels.attention.chosen import Chosen, attend_to_chosen
from quire.kernels.attention.chosen_by_head import ChosenByHead, attend_to_chosen_by_head
from quire.kernels.attention.index.operations import KERNELS, IndexOperations
from quire.kernels.attention.latent.attend import attend_by_expanding, takes_expanded
from quire.kernels.attention.latent.chosen import attend_to_chosen_latents
from quire.kernels.attention.latent.earlier import Earlier, plan_earlier
from quire.kernels.attention.latent.expansion import Expansion
from quire.kernels.attention.latent.write import write_latents, write_latents_reference
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.linear.operations import whole
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.plan import plan_attention
from quire.kernels.shapes import LayerShape, StepShape


def index_by(gpu: Gpu) -> IndexOperations | None:
    """Return by what tokens are chosen for indexers of known kinds; None: their own code chooses."""
    return KERNELS if gpu.has_kernels else None


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
        self._places = {layer: place for place, layer in enumerate(config.attention_layers)}
        self._layer_shapes, self._gpu = layer_shapes(config, dtype), gpu_of(device)
        self._keep = write_latents if self._gpu.has_kernels else write_latents_reference
        self._index_by = index_by(self._gpu)
        self._plans = None  # of a model whose layers all keep states
        if self._layer_shapes:
            self._plans = LayerPlans(self._layer_shapes, device, plan_attention)
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
        self._kernels, self._calls = [] if self._plans is None else self._plans.of(batch, caches), 0
        self._spans, self._rows = batch.spans, batch.token_rows
        self._pieces: dict[tuple[int, int], list[Piece]] = {}  # by heads and width of an indexer
        self._earlier: dict[tuple[int, int], Earlier] = {}  # by group and by numbers of heads

    def _place(self, layer: int) -> int:
        """Return which of the caches a call is of."""
        self._calls += 1
        return self._calls - 1 if self._in_call_order else self._places.get(layer, layer)

    def __call__(self, layer: int, call: Call) -> Tensor:
        place = self._place(layer)
        if self._ranks is None:
            return self._attended(place, call)
        own, is_whole = heads_of_rank(call, self._shapes[place], self._ranks)
        out = self._attended(place, own)
        if not is_whole or layer in self._splits:
            return out
        return gathered(out.flatten(2), self._ranks).unflatten(2, (-1, out.shape[-1]))

    def attend(self, layer: int, qkv: Tensor, attention: AttentionLayer) -> Tensor:
        layer = self._place(layer)
        return whole(self._kernels[layer].run(qkv, self._batches[layer], attention, self._caches[layer]))

    def choose(self, layer: int, indexer: Indexer) -> Any:
        batch, cache = self._batches[layer], self._caches[layer].index
        if cache is None:  # no request has more tokens than are chosen
            return EVERY
        parts = indexer.parts
        by = self._index_by
        if parts is not None and by is not None:
            self._keep(parts.keys(by.rotate), batch.slots, cache)
            if self._rows is None:
                return EVERY
            longest = batch.decode.block_tables.shape[1] * cache.block_size
            if self._spans:
                longest = max(span.context_len for span in self._spans)
            return choose_by_scores(parts, batch, self._rows, longest, cache, indexer.most, by)
        keep_keys(indexer, batch, cache, self._keep)
        if not self._spans:
            return EVERY
        size = indexer.heads, indexer.width
        if size not in self._pieces:
            self._pieces[size] = pieces(self._spans, indexer)
        if indexer.by_head:
            return choose_by_head(indexer, batch, self._pieces[size], cache)
        return choose(indexer, batch, self._spans, self._pieces[size], cache)

    def _earlier_of(self, batch: ForwardBatch, cache: LayerCache, expansion: Expansion) -> Earlier:
        """Return how earlier tokens of a step's chunks are attended to; layers that are alike share it."""
        assert batch.prefill is not None
        numbers = expansion.weight.shape[0] * expansion.weight.shape[1]
        key = id(batch), numbers
        if key not in self._earlier:
            token_bytes = numbers * cache.kv.element_size()
            self._earlier[key] = plan_earlier(batch.prefill, cache.block_size, token_bytes)
        return self._earlier[key]

    def _attended(self, layer: int, call: Call) -> Tensor:
        attention = self._layers[layer]
        if not call.plain:
            attention = replace(attention, softcap=call.softcap, sinks=call.sinks, slopes=call.slopes)
        batch, cache, expansion = self._batches[layer], self._caches[layer], call.expansion
        if (
            expansion is not None
            and call.chosen is None
            and takes_expanded(self._gpu, batch, attention, expansion, call.q.dtype)
        ):
            latents = _filled(call.k, attention.head_dim)[0]
            earlier = self._earlier_of(batch, cache, expansion)
            return attend_by_expanding(call.q, latents, expansion, batch, earlier, attention, cache)[None]
        qkv = _projected(call, attention.head_dim)
        out = self._attended_to(layer, qkv, batch, attention, cache, call.chosen)
        heads, tokens, _ = call.q.shape
        out = out.view(tokens, heads, attention.value_dim)
        if expansion is None:
            return out[None, ..., : call.value_dim]
        values = out.new_empty(1, tokens, heads, expansion.value)
        expansion.values(out, values[0])
        return values

    def _attended_to(
        self,
        layer: int,
        qkv: Tensor,
        batch: ForwardBatch,
        attention: AttentionLayer,
        cache: LayerCache,
        chosen: Chosen | ChosenByHead | None,
    ) -> Tensor:
        """Attend to all that tokens see, or to what is chosen of it -> [T, Hq Dv]."""
        if chosen is None:
            return whole(self._kernels[layer].run(qkv, batch, attention, cache))
        assert self._rows is not None
        shape = self._layer_shapes[layer]
        plan = self._plan(shape, cache)
        if isinstance(chosen, ChosenByHead):
            plan_of_head = self._plan(shape.of_kv_head, cache)
            return attend_to_chosen_by_head(
                qkv, batch, self._rows, attention, cache, chosen, plan, plan_of_head
            )
        if cache.latent and self._gpu.has_kernels:
            return attend_to_chosen_latents(qkv, batch, self._rows, attention, cache, chosen)
        return attend_to_chosen(qkv, batch, self._rows, attention, cache, chosen, plan)

    def _plan(self, shape: LayerShape, cache: LayerCache) -> Callable[[StepShape], Attend]:
        """Return what gives what attends in a step, in a layer whose keys are held as a cache's are."""
        return lambda step: plan_attention(self._gpu, shape, cache.format, step).run


def _projected(call: Call, head_dim: int) -> Tensor:
    """Return queries, and what is kept of tokens, side by side as a projection [T, …] would give them."""
    if call.expansion is None:
        parts = [_filled(part, head_dim) for part in (call.q, call.k, call.v)]
        return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1)
    heads, tokens, _ = call.q.shape
    rows = call.q.new_empty(tokens, heads + 1, head_dim)
    call.expansion.queries(call.q, rows[:, :heads])
    rows[:, heads] = _filled(call.k, head_dim)[0]
    return rows.flatten(1)


def _filled(heads: Tensor, head_dim: int) -> Tensor:
    """Return heads [H, T, D] with zeros behind their D numbers, which change neither scores nor sums."""
    missing = head_dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads
