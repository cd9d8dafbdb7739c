"""The pre-norm decoder with rotary positions and gated MLP: Llama, Mistral, Qwen2/2.5 and Qwen3."""

from __future__ import annotations

from torch import Tensor

from quire.engine.models.config import ModelConfig
from quire.engine.models.layers import LayerPlans, attention_layer, layer_shapes
from quire.engine.models.pre_norm import GatedMLP, PreNormLayer, run_layers
from quire.engine.models.rope import rope_table
from quire.engine.models.vocabulary import embed_part
from quire.engine.models.weights import Weights
from quire.engine.parallel.share import Columns
from quire.kernels.attention.batch import ForwardBatch
from quire.kernels.backend import Backend
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.plan import plan_layer


class Decoder:
    """The architectures differ by config only: biases, QK-norm, window per layer, rotary scaling."""

    base_prefix = "model."  # of a causal LM's checkpoint; a bare decoder's has none
    ignored = r"(.*\.)?rotary_emb\.inv_freq"  # a buffer in old Llama checkpoints, computed here

    def __init__(self, config: ModelConfig, backend: Backend, weights: Weights, max_model_len: int) -> None:
        if config.rope is None:
            raise ValueError(f"{config.architecture} needs rotary positions")
        self.config = config
        self.backend = backend
        self.ranks = weights.ranks
        self.kept = weights.kept
        self.embedding = weights.vocabulary("model.embed_tokens", config.vocab_size, config.hidden_size)
        rope = rope_table(config.rope, config.head_dim, max_model_len, weights.device)
        self.layers = [self._layer(weights, layer, rope) for layer in range(config.num_layers)]
        self.final_norm = weights.rms_norm("model.norm", config.hidden_size)
        self.plans = LayerPlans(layer_shapes(config, weights.dtype, weights.kept), weights.device, plan_layer)
        self.head = weights.output_head("model.embed_tokens", self.embedding, config)

    def _layer(self, weights: Weights, layer: int, rope: Tensor) -> PreNormLayer:
        config = self.config
        name = f"model.layers.{layer}"
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = Columns(config.num_heads * config.head_dim)
        keys = Columns(config.num_kv_heads * config.head_dim, config.kv_copies)
        qkv = {"q_proj": (queries,), "k_proj": (keys,), "v_proj": (keys,)}
        gate_up = dict.fromkeys(("gate_proj", "up_proj"), (Columns(inner),))
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = weights.rms_norm(f"{name}.self_attn.q_norm", config.head_dim)
            k_norm = weights.rms_norm(f"{name}.self_attn.k_norm", config.head_dim)
        return PreNormLayer(
            input_norm=weights.rms_norm(f"{name}.input_layernorm", hidden),
            qkv=weights.columns(f"{name}.self_attn", qkv, hidden, bias=config.qkv_bias),
            attention=attention_layer(config, layer, rope, q_norm, k_norm),
            output=weights.rows(f"{name}.self_attn.o_proj", hidden, queries.size, bias=config.output_bias),
            mlp_norm=weights.rms_norm(f"{name}.post_attention_layernorm", hidden),
            mlp=GatedMLP(
                gate_up=weights.columns(f"{name}.mlp", gate_up, hidden, bias=config.mlp_bias),
                down=weights.rows(f"{name}.mlp.down_proj", hidden, inner, bias=config.mlp_bias),
            ),
        )

    def forward(self, batch: ForwardBatch, cache: list[LayerCache]) -> Tensor:
        """Compute the batch's tokens over the layers' caches -> hidden [T, H], final norm applied.

        [R, H] of `batch.newest` where that is given: the last layer does no more than those need.
        """
        embedded = embed_part(batch.tokens, self.embedding, self.backend.embed, self.ranks)
        plans, norm = self.plans.of(batch, cache), self.backend.rms_norm
        return run_layers(
            self.layers, self.final_norm, self.config.norm_eps, embedded, batch, cache, plans, norm
        )

    def part_logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden [S, H] -> [S, V / ranks], the logits of this rank's tokens."""
        return self.backend.wide_linear(hidden, self.head)
