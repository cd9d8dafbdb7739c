"""GPT-2: learned positions, pre-norm, weights kept transposed in the checkpoint."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.engine.models.config import ModelConfig
from quire.engine.models.layers import ACTIVATIONS, LayerPlans, attention_layer
from quire.engine.models.plain_block import Block
from quire.engine.models.weights import Weights
from quire.kernels.attention.batch import ForwardBatch
from quire.kernels.backend import Backend
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.linear import Linear
from quire.kernels.plan import plan_attention


class GPT2:
    base_prefix = "transformer."  # the original checkpoints have no prefix
    ignored = r"(.*\.)?h\.\d+\.attn\.(bias|masked_bias)"  # causal-mask buffers, not the projections' biases

    def __init__(self, config: ModelConfig, backend: Backend, weights: Weights, max_model_len: int) -> None:
        del max_model_len  # learned positions come in the checkpoint's number
        self.config = config
        self.backend = backend
        hidden = config.hidden_size
        self.embedding = weights.embedding("transformer.wte", config.vocab_size, hidden)
        self.positions = weights.embedding("transformer.wpe", config.max_position_embeddings, hidden)
        self.layers = [self._layer(weights, layer) for layer in range(config.num_layers)]
        self.plans = LayerPlans(config, weights.dtype, weights.device, plan_attention)
        self.final_norm = weights.layer_norm("transformer.ln_f", hidden, config.norm_eps)
        self.head = weights.output_head("transformer.wte", self.embedding, tied=config.tie_word_embeddings)

    def _layer(self, weights: Weights, layer: int) -> Block:
        config = self.config
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        name = f"transformer.h.{layer}"

        def linear(prefix: str, part: str, in_features: int, out_features: int) -> Linear:
            return weights.linear(
                f"{name}.{prefix}", {part: out_features}, in_features, bias=True, transposed=True
            )

        return Block(
            attention_norm=weights.layer_norm(f"{name}.ln_1", hidden, eps),
            qkv=linear("attn", "c_attn", hidden, 3 * hidden),
            attention=attention_layer(config, layer),
            output=linear("attn", "c_proj", hidden, hidden),
            mlp_norm=weights.layer_norm(f"{name}.ln_2", hidden, eps),
            up=linear("mlp", "c_fc", hidden, inner),
            activation=ACTIVATIONS[config.activation],
            down=linear("mlp", "c_proj", inner, hidden),
        )

    def forward(self, batch: ForwardBatch, cache: list[LayerCache]) -> Tensor:
        """Compute the batch's tokens over the layers' caches -> hidden [T, H], final norm applied.

        [R, H] of `batch.newest` where that is given: the last layer does no more than those need.
        """
        x = F.embedding(batch.tokens, self.embedding) + F.embedding(batch.positions, self.positions)
        newest_by_layer, plans = batch.newest_by_layer(len(self.layers)), self.plans.of(batch, cache)
        for layer, layer_cache, plan, newest in zip(self.layers, cache, plans, newest_by_layer, strict=True):
            x = layer.pre_norm(x, batch, layer_cache, plan.run, newest)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden [S, H] -> [S, V]."""
        return self.backend.wide_linear(hidden, self.head)
