"""OPT: learned positions, layer norms before (or, in the 350M, after) attention and MLP."""

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

POSITION_OFFSET = 2  # the first rows of the position table were fairseq's padding


class OPT:
    """OPT of every size, Galactica's variations (no biases, GELU) included."""

    base_prefix = "model."
    ignored = r"(model\.)?decoder\.version"  # a fairseq buffer in old checkpoints

    def __init__(self, config: ModelConfig, backend: Backend, weights: Weights, max_model_len: int) -> None:
        del max_model_len  # learned positions come in the checkpoint's number
        self.config = config
        self.backend = backend
        self.ranks = weights.ranks
        name = "model.decoder"
        hidden, size = config.hidden_size, config.embedding_size
        self.embedding = weights.vocabulary(f"{name}.embed_tokens", config.vocab_size, size)
        rows = config.max_position_embeddings + POSITION_OFFSET
        self.positions = weights.embedding(f"{name}.embed_positions", rows, hidden)[POSITION_OFFSET:]
        self.project_in = self.project_out = None
        if size != hidden:
            self.project_in = dense(weights.linear(name, {"project_in": hidden}, size, bias=False))
            self.project_out = dense(weights.linear(name, {"project_out": size}, hidden, bias=False))
        self.layers = [self._layer(weights, layer) for layer in range(config.num_layers)]
        self.plans = LayerPlans(layer_shapes(config, weights.dtype), weights.device, plan_attention)
        self.final_norm = None
        if config.final_norm:
            self.final_norm = weights.layer_norm(
                f"{name}.final_layer_norm", hidden, config.norm_eps, affine=config.norm_affine
            )
        self.head = weights.output_head(f"{name}.embed_tokens", self.embedding, config)

    def _layer(self, weights: Weights, layer: int) -> Block:
        config = self.config
        name = f"model.decoder.layers.{layer}"
        hidden, inner, eps, affine = (
            config.hidden_size,
            config.intermediate_size,
            config.norm_eps,
            config.norm_affine,
        )
        heads = Columns(config.num_heads * config.head_dim)
        qkv = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (heads,))
        return Block(
            attention_norm=weights.layer_norm(f"{name}.self_attn_layer_norm", hidden, eps, affine=affine),
            qkv=dense(weights.columns(f"{name}.self_attn", qkv, hidden, bias=config.qkv_bias)),
            attention=attention_layer(config, layer),
            output=dense(
                weights.rows(f"{name}.self_attn.out_proj", hidden, heads.size, bias=config.output_bias)
            ),
            mlp_norm=weights.layer_norm(f"{name}.final_layer_norm", hidden, eps, affine=affine),
            up=dense(weights.columns(name, {"fc1": (Columns(inner),)}, hidden, bias=config.mlp_bias)),
            activation=ACTIVATIONS[config.activation],
            down=dense(weights.rows(f"{name}.fc2", hidden, inner, bias=config.mlp_bias)),
        )

    def forward(self, batch: ForwardBatch, cache: list[LayerCache]) -> Tensor:
        """Compute the batch's tokens over the layers' caches -> hidden [T, H], final norm applied.

        [R, H] of `batch.newest` where that is given: the last layer does no more than those need.
        """
        x = embed(batch.tokens, self.embedding, F.embedding, self.ranks)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + F.embedding(batch.positions, self.positions)
        run = Block.pre_norm if self.config.norm_before else Block.post_norm
        newest_by_layer, plans = batch.newest_by_layer(len(self.layers)), self.plans.of(batch, cache)
        for layer, layer_cache, plan, newest in zip(self.layers, cache, plans, newest_by_layer, strict=True):
            x = run(layer, x, batch, layer_cache, plan.run, newest)
        return x if self.final_norm is None else self.final_norm(x)

    def part_logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden [S, H] -> [S, V / ranks], the logits of this rank's tokens."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return self.backend.wide_linear(hidden, self.head)
