"""What the architectures share: layer norm, activations, attention over the paged cache.

Plain objects over plain tensors: at one token a step is bound by how fast Python launches kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.models.batch import ForwardBatch, Newest, PrefillBatch, of_newest
from quire.engine.models.config import Activation, ModelConfig
from quire.kernels.attention.qk_norm_rope import NewHeads
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

    __slots__ = ("backend", "head_dim", "heads", "num_heads", "scale", "window")

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
        self.heads = NewHeads(rope, q_norm, k_norm, config.norm_eps)
        self.scale = config.head_dim**-0.5
        self.window = window

    def __call__(self, qkv: Tensor, batch: ForwardBatch, cache: LayerCache, newest: Newest | None) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) D] (q may be overwritten), this layer's cache -> [T, Hq D].

        With `newest`, all K and V go to the cache, but only those R tokens are attended for -> [R, Hq D].
        """
        if newest is not None:
            return self._of_newest(qkv, batch, newest, cache)
        out = self._out(qkv)
        if batch.prefill is None:
            self.backend.decode_new_tokens(*self._decoding(qkv, out, batch, cache))
        else:
            self._mixed(qkv, out, batch, batch.prefill, cache)
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
            decoding = self._decoding(qkv, self._out(qkv), batch, cache)
            self.backend.add_decoded(residual, output.weight, output.bias, *decoding)
            return residual
        attended = self(qkv, batch, cache, newest)
        residual = of_newest(residual, newest)
        self.backend.add_linear(residual, attended, output.weight, output.bias)
        return residual

    def _out(self, qkv: Tensor) -> Tensor:
        return torch.empty(len(qkv), self.num_heads, self.head_dim, dtype=qkv.dtype, device=qkv.device)

    def _decoding(
        self, qkv: Tensor, out: Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> tuple[object, ...]:
        """What `decode_new_tokens` takes."""
        kv, kv_scales, _ = cache
        return (
            qkv,
            out,
            kv,
            batch.positions,
            batch.slots,
            batch.block_tables,
            batch.decode_rows,
            batch.decode_context_lens,
            batch.decode_order,
            self.heads,
            self.scale,
            self.window,
            batch.workspace,
            batch.shared,
            kv_scales,
        )

    def _mixed(
        self, qkv: Tensor, out: Tensor, batch: ForwardBatch, prefill: PrefillBatch, cache: LayerCache
    ) -> None:
        kv, kv_scales, expanded = cache
        if self.window:  # attention with one reads the cache itself
            expanded = None
        q, backend = self._to_cache(qkv, batch, cache, expanded), self.backend
        backend.prefill_attention(
            q,
            out,
            kv,
            batch.block_tables,
            prefill.rows,
            prefill.query_starts,
            prefill.context_lens,
            prefill.max_query_len,
            self.scale,
            self.window,
            kv_scales,
            expanded,
        )
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
                kv_scales=kv_scales,
                beside=len(prefill.rows) > 0,
            )

    def _of_newest(self, qkv: Tensor, batch: ForwardBatch, newest: Newest, cache: LayerCache) -> Tensor:
        q = of_newest(self._to_cache(qkv, batch, cache), newest)
        out = torch.empty_like(q)
        kv, kv_scales, _ = cache
        self.backend.decode_attention(
            q,
            out,
            kv,
            batch.block_tables,
            newest.rows,
            newest.context_lens,
            newest.order,
            self.scale,
            self.window,
            batch.workspace,
            kv_scales=kv_scales,
        )
        return out.flatten(1)

    def _to_cache(
        self, qkv: Tensor, batch: ForwardBatch, cache: LayerCache, expanded: Tensor | None = None
    ) -> Tensor:
        """K and V of all tokens to the cache, and as numbers where prefill attention finds them.

        -> q [T, Hq, D], normalised and rotated: a view of qkv.
        """
        kv, kv_scales, _ = cache
        heads = self.heads
        self.backend.qkv_to_cache(
            qkv,
            batch.positions,
            batch.slots,
            kv,
            self.num_heads,
            heads.rope,
            heads.q_norm,
            heads.k_norm,
            heads.eps,
            kv_scales,
            expanded,
        )
        return qkv[:, : self.num_heads * self.head_dim].unflatten(1, (self.num_heads, self.head_dim))
