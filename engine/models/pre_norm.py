"""Pre-norm layers: RMSNorm, attention with rotary positions, RMSNorm, MLP, each added to the residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, ForwardBatch, of_newest
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.linear import Matrix
from quire.kernels.linear.operations import AnyLinear, Hidden
from quire.kernels.plan import LayerOps
from quire.kernels.quantised.weight import QuantisedWeight


class MLP(Protocol):
    """What stands behind a layer's second norm."""

    @property
    def matrices(self) -> tuple[Matrix, Matrix] | None:
        """Return the products into it and out of it, if `LayerOps` computes them."""

    def run(self, ops: LayerOps, hidden: Hidden, norm: Tensor, norm_after: Tensor, eps: float) -> Hidden:
        """Add to the residual what comes of its `norm`; `norm_after` is the next layer's."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(silu(gate) · up)."""

    gate_up: AnyLinear
    down: AnyLinear

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        return self.gate_up.matrix, self.down.matrix

    def run(self, ops: LayerOps, hidden: Hidden, norm: Tensor, norm_after: Tensor, eps: float) -> Hidden:
        assert ops.gate is not None and ops.down is not None
        inner = ops.gate.run(hidden, norm, eps, self.gate_up)
        return ops.down.run(hidden.residual, inner, self.down, norm_after, eps)


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    input_norm: Tensor
    qkv: AnyLinear
    attention: AttentionLayer
    output: AnyLinear
    mlp_norm: Tensor
    mlp: MLP

    @property
    def weights(self) -> list[Tensor | QuantisedWeight]:
        """Return the weights of the products that `LayerOps` computes."""
        mlp = (self.mlp.gate_up, self.mlp.down) if isinstance(self.mlp, GatedMLP) else ()
        return [layer.weight for layer in (self.qkv, self.output, *mlp)]


def run_layers(
    layers: Sequence[PreNormLayer],
    final_norm: Tensor,
    eps: float,
    embedded: Tensor,
    batch: ForwardBatch,
    caches: list[LayerCache],
    plans: list[LayerOps],
    rms_norm: Callable[[Tensor, Tensor, float], Tensor],
) -> Tensor:
    """Compute embedded tokens [T, H], which are overwritten -> [T, H], final norm applied.

    [R, H] of `batch.newest` where that is given: the last layer does no more than those need.
    """
    hidden = Hidden(embedded)
    norms_after = [layer.input_norm for layer in layers[1:]] + [final_norm]
    newest_by_layer = batch.newest_by_layer(len(layers))
    batches = batch.by_layer(len(layers))
    for layer, norm_after, cache, ops, newest, own in zip(
        layers, norms_after, caches, plans, newest_by_layer, batches, strict=True
    ):
        qkv = ops.project_in.run(hidden, layer.input_norm, eps, layer.qkv)
        attended = ops.attend.run(qkv, own, layer.attention, cache)
        residual = of_newest(hidden.residual, newest)
        hidden = ops.project_out.run(residual, attended, layer.output, layer.mlp_norm, eps)
        hidden = layer.mlp.run(ops, hidden, layer.mlp_norm, norm_after, eps)
    residual, normed = hidden
    return rms_norm(residual, final_norm, eps) if normed is None else normed
