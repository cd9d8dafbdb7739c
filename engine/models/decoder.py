"""The pre-norm decoder with rotary positions and gated MLP: Llama, Mistral, Qwen2/2.5 and Qwen3."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.engine.models.batch import ForwardBatch, Newest, of_newest
from quire.engine.models.config import ModelConfig
from quire.engine.models.layers import Attention
from quire.engine.models.rope import rope_table
from quire.engine.models.weights import Weights
from quire.kernels.backend import Backend
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.linear import Linear


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    attention: Attention
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """The architectures differ by config only: biases, QK-norm, window per layer, rotary scaling."""

    base_prefix = "model."  # of a causal LM's checkpoint; a bare decoder's has none
    ignored = r"(.*\.)?rotary_emb\.inv_freq"  # a buffer in old Llama checkpoints, computed here

    def __init__(self, config: ModelConfig, backend: Backend, weights: Weights, max_model_len: int) -> None:
        if config.rope is None:
            raise ValueError(f"{config.architecture} needs rotary positions")
        self.config = config
        self.backend = backend
        self.embedding = weights.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        rope = rope_table(config.rope, config.head_dim, max_model_len, weights.device)
        self.layers = [self._layer(weights, layer, rope) for layer in range(config.num_layers)]
        self.final_norm = weights.rms_norm("model.norm", config.hidden_size)
        self.norms_after = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        inner_sizes = (config.num_heads * config.head_dim, config.intermediate_size)
        qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.most_fused = backend.most_fused_tokens(
            config.hidden_size, inner_sizes, qkv_size, self.final_norm.dtype
        )
        self.head = weights.output_head("model.embed_tokens", self.embedding, tied=config.tie_word_embeddings)

    def _layer(self, weights: Weights, layer: int, rope: Tensor) -> _Layer:
        config = self.config
        name = f"model.layers.{layer}"
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = weights.rms_norm(f"{name}.self_attn.q_norm", config.head_dim)
            k_norm = weights.rms_norm(f"{name}.self_attn.k_norm", config.head_dim)
        return _Layer(
            input_norm=weights.rms_norm(f"{name}.input_layernorm", hidden),
            qkv=weights.linear(f"{name}.self_attn", qkv, hidden, bias=config.qkv_bias),
            attention=Attention(self.backend, config, config.windows[layer], rope, q_norm, k_norm),
            output=weights.linear(f"{name}.self_attn", {"o_proj": hidden}, q_size, bias=config.output_bias),
            mlp_norm=weights.rms_norm(f"{name}.post_attention_layernorm", hidden),
            gate_up=weights.linear(
                f"{name}.mlp", {"gate_proj": inner, "up_proj": inner}, hidden, bias=config.mlp_bias
            ),
            down=weights.linear(f"{name}.mlp", {"down_proj": hidden}, inner, bias=config.mlp_bias),
        )

    def forward(self, batch: ForwardBatch, cache: list[LayerCache]) -> Tensor:
        """Compute the batch's tokens over the layers' caches -> hidden [T, H], final norm applied.

        [R, H] of `batch.newest` where that is given: the last layer does no more than those need.
        """
        residual = self.backend.embed(batch.tokens, self.embedding)
        newest_by_layer = batch.newest_by_layer(len(self.layers))
        layers = list(zip(self.layers, self.norms_after, cache, newest_by_layer, strict=True))
        if len(residual) <= self.most_fused:
            return self._few_tokens(residual, batch, layers)
        backend, eps = self.backend, self.config.norm_eps
        x = backend.rms_norm(residual, self.layers[0].input_norm, eps)
        for layer, norm_after, layer_cache, newest in layers:
            attended = layer.attention(backend.linear(x, layer.qkv), batch, layer_cache, newest)
            x, residual = backend.add_linear_norm(
                of_newest(residual, newest), attended, layer.output, layer.mlp_norm, eps
            )
            inner = backend.silu_linear(x, layer.gate_up)
            x, residual = backend.add_linear_norm(residual, inner, layer.down, norm_after, eps)
        return x

    def _few_tokens(
        self,
        residual: Tensor,
        batch: ForwardBatch,
        layers: list[tuple[_Layer, Tensor, LayerCache, Newest | None]],
    ) -> Tensor:
        """The same layers in fewer kernels, which only few tokens are quicker by."""
        backend, eps = self.backend, self.config.norm_eps
        for layer, _, layer_cache, newest in layers:
            qkv = backend.norm_linear(residual, layer.input_norm, eps, layer.qkv.weight, layer.qkv.bias)
            residual = layer.attention.add(residual, layer.output, qkv, batch, layer_cache, newest)
            gate_up = layer.gate_up
            inner = backend.norm_silu_linear(residual, layer.mlp_norm, eps, gate_up.weight, gate_up.bias)
            backend.add_linear(residual, inner, layer.down.weight, layer.down.bias)
        return backend.rms_norm(residual, self.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, H] -> [S, V]."""
        return self.backend.wide_linear(hidden, self.head)
