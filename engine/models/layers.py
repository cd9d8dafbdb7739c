"""What the architectures share: layer norm, activations, a layer's shape, the plans of layers.

Plain objects over plain tensors: at one token a step is bound by how fast Python launches kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.models.config import Activation, ModelConfig
from quire.kernels.attention.batch import AttentionLayer, ForwardBatch
from quire.kernels.formats.kv_format import KVFormat
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import Gpu, gpu_of
from quire.kernels.linear.linear import Matrix, Share
from quire.kernels.quantised.weight import WeightFormat
from quire.kernels.shapes import LayerShape, StepShape

Plan = TypeVar("Plan")
# The weights of a decoder's layer by products: into attention, out of it, into the MLP, and down.
PRODUCTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
NONE_KEPT: Mapping[str, WeightFormat] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class LayerNorm:
    """weight and bias [H], or None: x [T, H] -> [T, H]."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def names_of(layer: int, parts: tuple[str, ...]) -> list[str]:
    """Return what a checkpoint calls the weights of a decoder's product."""
    return [f"model.layers.{layer}.{part}.weight" for part in parts]


def layer_shape(
    config: ModelConfig, layer: int, dtype: torch.dtype, kept: Mapping[str, WeightFormat] = NONE_KEPT
) -> LayerShape:
    """Return a layer, computed in dtype, as the choice of kernels sees it.

    kept: weights of a decoder that stay in few bits, see `kept_weights`.
    """
    cache = config.cache_specs[layer]
    heads, plain, chunked = config.num_heads, True, False
    if config.attention:
        attention = config.attention[layer]
        chunked = attention.chunked and cache.window > 0
        heads, plain = attention.heads, attention.plain and not chunked
    q_size, kv_size = heads * cache.head_dim, cache.heads * cache.head_dim
    hidden, inner, gated = config.hidden_size, config.intermediate_size, config.rope is not None
    share: Share = "whole" if config.ranks == 1 else "inputs"
    matrices = (
        Matrix(q_size + 2 * kv_size, hidden, config.qkv_bias),
        Matrix(hidden, q_size, config.output_bias, share=share),
        Matrix(2 * inner if gated else inner, hidden, config.mlp_bias),
        Matrix(hidden, inner, config.mlp_bias, share=share),
    )
    qkv, output, up, down = (
        replace(matrix, format=kept.get(names_of(layer, parts)[0], "dense"))
        for parts, matrix in zip(PRODUCTS, matrices, strict=True)
    )
    return LayerShape(
        dtype=dtype,
        num_heads=heads,
        cache=cache,
        qkv=qkv,
        output=output,
        up=up,
        down=down,
        gated=gated,
        plain=plain,
        chunked=chunked,
    )


def layer_shapes(
    config: ModelConfig, dtype: torch.dtype, kept: Mapping[str, WeightFormat] = NONE_KEPT
) -> list[LayerShape]:
    """Return `layer_shape` of every layer."""
    return [layer_shape(config, layer, dtype, kept) for layer in range(config.num_layers)]


def attention_layer(
    config: ModelConfig,
    layer: int,
    rope: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> AttentionLayer:
    """Return a layer's attention; rope, q_norm and k_norm as `AttentionLayer` has them."""
    return AttentionLayer(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.windows[layer],
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=config.norm_eps,
    )


class LayerPlans(Generic[Plan]):
    """The kernels of each of a model's layers, chosen once for steps of the same sizes.

    plan: `kernels.plan.plan_layer`, or `plan_attention` for layers of which only that is chosen.
    """

    def __init__(
        self,
        shapes: list[LayerShape],
        device: torch.device,
        plan: Callable[[Gpu, LayerShape, KVFormat, StepShape], Plan],
    ) -> None:
        self._gpu = gpu_of(device)
        *before, self._last = shapes
        self._kinds = list(dict.fromkeys(before))
        self._kind_of = [self._kinds.index(shape) for shape in before]  # to hash a shape takes a while
        self._plan = plan

    def of(self, batch: ForwardBatch, cache: list[LayerCache]) -> list[Plan]:
        """Return each layer's for a step over the layers' caches."""
        held, step = cache[0].format, batch.shape(cache[0].block_size)
        plans = [self._plan(self._gpu, kind, held, step) for kind in self._kinds]
        last = step if batch.newest is None else batch.shape(cache[0].block_size, last=True)
        return [*(plans[kind] for kind in self._kind_of), self._plan(self._gpu, self._last, held, last)]
