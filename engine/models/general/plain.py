"""Decoders of pre-norm layers with layer norms, and an MLP of two products (Starcoder2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.models.general.mlps import Ungated
from quire.engine.models.layers import LayerNorm, LayerPlans
from quire.kernels.attention.batch import AttentionLayer, ForwardBatch, of_newest
from quire.kernels.backend import Backend
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.operations import AnyLinear, whole
from quire.kernels.plan import plan_attention
from quire.kernels.shapes import LayerShape


@dataclass(frozen=True, slots=True)
class PlainLayer:
    input_norm: LayerNorm
    qkv: AnyLinear
    attention: AttentionLayer
    output: AnyLinear
    mlp_norm: LayerNorm
    mlp: Ungated


class PlainDecoder:
    """Such a decoder, without any of its own code."""

    def __init__(
        self,
        layers: list[PlainLayer],
        final_norm: LayerNorm,
        embed: Callable[[Tensor], Tensor],
        shapes: list[LayerShape],
        backend: Backend,
        device: torch.device,
    ) -> None:
        self.layers, self._embed, self._backend = layers, embed, backend
        self._norms_after = [layer.input_norm for layer in layers[1:]] + [final_norm]
        self._plans = LayerPlans(shapes, device, plan_attention)

    def run(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Compute as `GeneralModel.forward` does."""
        count, backend = len(self.layers), self._backend
        residual, norm = self._embed(batch.tokens), self.layers[0].input_norm
        normed = backend.layer_norm(residual, norm.weight, norm.bias, norm.eps)
        for layer, norm_after, cache, attend, newest, own in zip(
            self.layers,
            self._norms_after,
            caches,
            self._plans.of(batch, caches),
            batch.newest_by_layer(count),
            batch.by_layer(count),
            strict=True,
        ):
            attended = whole(attend.run(backend.linear(normed, layer.qkv), own, layer.attention, cache))
            residual, norm, mlp = of_newest(residual, newest), layer.mlp_norm, layer.mlp
            normed = backend.add_linear(residual, attended, layer.output, norm.weight, norm.bias, norm.eps)
            inner = backend.activated_linear(normed, mlp.up, mlp.activation)
            norm = norm_after
            normed = backend.add_linear(residual, inner, mlp.down, norm.weight, norm.bias, norm.eps)
        return normed
