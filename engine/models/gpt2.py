"""GPT-2: learned positions, pre-norm, weights kept transposed in the checkpoint."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.engine.models.config import ModelConfig
from quire.engine.models.layers import ACTIVATIONS, LayerPlans, attention_layer, layer_shapes
from quire.engine.models.plain_block import Block
from quire.engine.models.vocabulary import embed
from quire.engine.models.weights import Weights, dense
from quire.engine.parallel.share import Columns
from quire.kernels.attention.batch import ForwardBatch
from quire.kernels.backend import Backend
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.plan import plan_attention


class GPT2:
    base_prefix = "transformer."  # the original checkpoints have no prefix
    ignored = r"(.*\.)?h\.\d+\.attn\.(bias|masked_bias)"  # causal-mask buffers, not the projections' biases

    def __init__(self, config: ModelConfig, backend: Backend, weights: Weights, max_model_len: int) -> None:
        del max_model_len  # learned positions come in the checkpoint's number
        self.config = config
        self.backend = backend
        self.ranks = weights.ranks
        hidden = config.hidden_size
        self.embedding = weights.vocabulary("transformer.wte", config.vocab_size, hidden)
        self.positions = weights.embedding("transformer.wpe", config.max_position_embeddings, hidden)
        self.layers = [self._layer(weights, layer) for layer in range(config.num_layers)]
        self.plans = LayerPlans(layer_shapes(config, weights.dtype), weights.device, plan_attention)
        self.final_norm = weights.layer_norm("transformer.ln_f", hidden, config.norm_eps)
        self.head = weights.output_head("transformer.wte", self.embedding, config)

    def _layer(self, weights: Weights, layer: int) -> Block:
        config = self.config
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        name = f"transformer.h.{layer}"

        heads = Columns(config.num_heads * config.head_dim)
        qkv, up = {"c_attn": (heads, heads, heads)}, {"c_fc": (Columns(inner),)}
        return Block(
            attention_norm=weights.layer_norm(f"{name}.ln_1", hidden, eps),
            qkv=dense(weights.columns(f"{name}.attn", qkv, hidden, bias=True, transposed=True)),
            attention=attention_layer(config, layer),
            output=dense(weights.rows(f"{name}.attn.c_proj", hidden, heads.size, bias=True, transposed=True)),
            mlp_norm=weights.layer_norm(f"{name}.ln_2", hidden, eps),
            up=dense(weights.columns(f"{name}.mlp", up, hidden, bias=True, transposed=True)),
            activation=ACTIVATIONS[config.activation],
            down=dense(weights.rows(f"{name}.mlp.c_proj", hidden, inner, bias=True, transposed=True)),
        )

    def forward(self, batch: ForwardBatch, cache: list[LayerCache]) -> Tensor:
        """Compute the batch's tokens over the layers' caches -> hidden [T, H], final norm applied.

        [R, H] of `batch.newest` where that is given: the last layer does no more than those need.
        """
        x = embed(batch.tokens, self.embedding, F.embedding, self.ranks) + F.embedding(
            batch.positions, self.positions
        )
        newest_by_layer, plans = batch.newest_by_layer(len(self.layers)), self.plans.of(batch, cache)
        for layer, layer_cache, plan, newest in zip(self.layers, cache, plans, newest_by_layer, strict=True):
            x = layer.pre_norm(x, batch, layer_cache, plan.run, newest)
        return self.final_norm(x)

    def part_logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden [S, H] -> [S, V / ranks], the logits of this rank's tokens."""
        return self.backend.wide_linear(hidden, self.head)
