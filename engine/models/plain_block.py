"""The layer of OPT and GPT-2: attention and a plain two-layer MLP, each with a layer norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.engine.models.layers import LayerNorm
from quire.kernels.attention.attend import Attend
from quire.kernels.attention.batch import AttentionLayer, ForwardBatch, Newest, of_newest
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import whole


@dataclass(frozen=True, slots=True)
class Block:
    attention_norm: LayerNorm
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    mlp_norm: LayerNorm
    up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear

    def pre_norm(
        self, x: Tensor, batch: ForwardBatch, cache: LayerCache, attend: Attend, newest: Newest | None
    ) -> Tensor:
        """Compute x [T, H] -> [T, H], or [R, H] of the newest tokens; norms before attention and MLP."""
        attended = whole(attend(self.qkv(self.attention_norm(x)), batch, self.attention, cache))
        x = of_newest(x, newest) + self.output(attended)
        return x + self.down(self.activation(self.up(self.mlp_norm(x))))

    def post_norm(
        self, x: Tensor, batch: ForwardBatch, cache: LayerCache, attend: Attend, newest: Newest | None
    ) -> Tensor:
        """Compute x [T, H] -> [T, H], or [R, H] of the newest tokens; norms after the residual sums."""
        attended = whole(attend(self.qkv(x), batch, self.attention, cache))
        x = self.attention_norm(of_newest(x, newest) + self.output(attended))
        return self.mlp_norm(x + self.down(self.activation(self.up(x))))
