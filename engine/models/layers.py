"""What the architectures share: layer norm, activations, attention over the paged cache.

Plain objects over plain tensors: at one token a step is bound by how fast Python launches kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.models.config import Activation, ModelConfig
from quire.kernels.attention.batch import AttentionLayer, ForwardBatch, Newest, of_newest
from quire.kernels.backend import Backend
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.linear import Linear


class LayerNorm:
    """weight and bias [H], or None: x [T, H] -> [T, H]."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Attention:
    """One layer's attention: K and V of the fused projection to the cache, then queries over contexts."""

    __slots__ = ("backend", "layer")

    def __init__(
        self,
        backend: Backend,
        config: ModelConfig,
        window: int,
        rope: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> None:
        self.backend = backend
        self.layer = AttentionLayer(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=window,
            rope=rope,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=config.norm_eps,
        )

    def __call__(self, qkv: Tensor, batch: ForwardBatch, cache: LayerCache, newest: Newest | None) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) D] (q may be overwritten), this layer's cache -> [T, Hq D].

        With `newest`, all K and V go to the cache, but only those R tokens are attended for -> [R, Hq D].
        """
        backend, layer = self.backend, self.layer
        if newest is not None:
            backend.write_kv(qkv, batch.positions, batch.slots, layer, cache)
            q = of_newest(layer.queries(qkv), newest)
            out = torch.empty_like(q)
            backend.decode(q, out, newest.queries, layer, cache)
            return out.flatten(1)
        out = self._out(qkv)
        if batch.prefill is None:
            backend.decode_new_tokens(qkv, out, batch, layer, cache)
            return out.flatten(1)
        backend.write_kv(qkv, batch.positions, batch.slots, layer, cache, expand=True)
        q = layer.queries(qkv)
        backend.prefill(q, out, batch.prefill, layer, cache)
        if batch.decode.rows.shape[0]:
            backend.decode_beside(q, out, batch, layer, cache)
        return out.flatten(1)

    def add(
        self,
        residual: Tensor,
        output: Linear,
        qkv: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        newest: Newest | None,
    ) -> Tensor:
        """residual [T, H] plus `output` of what a call gives; with `newest`, those R tokens' [R, H].

        The residual may be changed in place.
        """
        if batch.prefill is None and newest is None:
            self.backend.add_decoded(residual, output, qkv, self._out(qkv), batch, self.layer, cache)
            return residual
        attended = self(qkv, batch, cache, newest)
        residual = of_newest(residual, newest)
        self.backend.add_linear(residual, attended, output.weight, output.bias)
        return residual

    def _out(self, qkv: Tensor) -> Tensor:
        layer = self.layer
        return torch.empty(len(qkv), layer.num_heads, layer.head_dim, dtype=qkv.dtype, device=qkv.device)
