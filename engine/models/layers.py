"""What the architectures share: linear layers, layer norm, activations, attention over the paged cache.

Plain objects over plain tensors: at one token a step is bound by how fast Python launches kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv_cache import LayerCache
from engine.models.batch import ForwardBatch
from engine.models.config import Activation, ModelConfig
from kernels.backend import Backend


class Linear:
    """weight [out, in], bias [out] or None: x [T, in] -> [T, out]."""

    __slots__ = ("_added", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._added = bias
        outputs, inputs = weight.shape
        if bias is None and weight.is_cuda and inputs > 2 * outputs:
            # torch asks cuBLASLt instead of cuBLAS when it adds a bias, and that divides long sums of few
            # tokens better: 53.7 against 46.1 µs at 128 tokens, 14336 -> 4096 on an H100.
            self._added = torch.zeros(outputs, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self._added)


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

    __slots__ = (
        "backend",
        "head_dim",
        "k_norm",
        "norm_eps",
        "num_heads",
        "q_norm",
        "q_size",
        "rope",
        "scale",
        "window",
    )

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
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.q_size = config.num_heads * config.head_dim
        self.scale = config.head_dim**-0.5
        self.norm_eps = config.norm_eps
        self.window = window
        self.rope = rope
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(self, qkv: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) D] (q is overwritten), this layer's cache -> [T, Hq D]."""
        backend = self.backend
        kv, kv_scales = cache
        backend.qkv_to_cache(
            qkv,
            batch.positions,
            batch.slots,
            kv,
            self.num_heads,
            self.rope,
            self.q_norm,
            self.k_norm,
            self.norm_eps,
            kv_scales,
        )
        q = qkv[:, : self.q_size].unflatten(1, (self.num_heads, self.head_dim))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if batch.decode_rows.shape[0]:
            backend.decode_attention(
                q,
                out,
                kv,
                batch.block_tables,
                batch.decode_rows,
                batch.decode_context_lens,
                batch.decode_order,
                self.scale,
                self.window,
                batch.workspace,
                shared=batch.shared,
                kv_scales=kv_scales,
            )
        if batch.prefill is not None:
            backend.prefill_attention(
                q,
                out,
                kv,
                batch.block_tables,
                batch.prefill.rows,
                batch.prefill.query_starts,
                batch.prefill.context_lens,
                batch.prefill.max_query_len,
                self.scale,
                self.window,
                kv_scales,
            )
        return out.flatten(1)
