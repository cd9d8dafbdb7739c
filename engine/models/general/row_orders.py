"""In what order kernels want the rows of attention's projections, where a model has them in another one.

Kernels rotate a head's first half with its second. Of a head that is rotated in part the pairs are moved to
where kernels have them, and what is not rotated is turned by no angle: of queries and keys in the same order
scores are what they were. A projection of queries may have each head's gate behind it (Qwen3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.engine.models.general.kept_linear import KeptLinear, release
from quire.kernels.linear.linear import Linear
from quire.kernels.linear.operations import AnyLinear
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.rows import in_order


def whole_table(rope: Tensor, head_dim: int) -> Tensor:
    """Return a table [max_len, D] for heads of D numbers, of which `rope` [max_len, R] rotates R."""
    rest = (head_dim - rope.shape[1]) // 2
    if not rest:
        return rope
    cos, sin = rope.chunk(2, dim=1)
    still = rope.new_zeros(len(rope), rest)
    return torch.cat((cos, still + 1, sin, still), dim=1)


def order_of_head(rotated: int, head_dim: int, device: torch.device) -> Tensor:
    """Return which of a head's numbers [D] kernels have at each place, if the first `rotated` are turned."""
    numbers = torch.arange(head_dim, device=device)
    turned, still = numbers[:rotated].chunk(2), numbers[rotated:].chunk(2)
    return torch.cat((turned[0], *still[:1], turned[1], *still[1:]))


def order_of_rows(heads: int, kv_heads: int, of_head: Tensor, *, gated: bool) -> Tensor:
    """Return which rows of queries', keys' and values' projections kernels have at each place.

    Queries, keys, values, and then gates. gated: of queries each head has as many rows for a gate behind it.
    """
    head_dim, device = len(of_head), of_head.device

    def rows_of(count: int, apart: int, within: Tensor) -> Tensor:
        return (torch.arange(count, device=device)[:, None] * apart + within).flatten()

    plain, width = torch.arange(head_dim, device=device), head_dim * (2 if gated else 1)
    queries, keys = rows_of(heads, width, of_head), rows_of(kv_heads, head_dim, of_head) + heads * width
    values = rows_of(kv_heads, head_dim, plain) + heads * width + kv_heads * head_dim
    gates = [rows_of(heads, width, plain) + head_dim] if gated else []
    return torch.cat((queries, keys, values, *gates))


@dataclass(frozen=True, slots=True)
class Reordered:
    """Layers whose rows a product has in another order; they have no weights of their own meanwhile.

    order: which of their rows, one layer's behind the other's, the product has at each place.
    """

    parts: Sequence[nn.Linear]
    product: AnyLinear
    order: Tensor

    def give_back(self) -> None:
        """Let the layers have their weights again."""
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(places), device=places.device)
        begin = 0
        for part in self.parts:
            rows = places[begin : begin + part.out_features]
            own = _rows_of(self.product, rows)
            if isinstance(part, KeptLinear):
                assert isinstance(own, QuantisedLinear)
                part.kept = own.weight
            else:
                assert isinstance(own, Linear)
                part.weight.data = own.weight
            if part.bias is not None and own.bias is not None:
                part.bias.data = own.bias
            begin += part.out_features


def reordered(parts: Sequence[nn.Linear], product: AnyLinear, order: Tensor) -> Reordered:
    """Take the layers' weights for a product [rows, in] of them all, with rows in that order."""
    taken = _rows_of(product, order)
    for part in parts:
        release(part)
    return Reordered(parts, taken, order)


def _rows_of(product: AnyLinear, rows: Tensor) -> AnyLinear:
    """Return a copy of those rows."""
    bias = None if product.bias is None else product.bias[rows]
    if isinstance(product, QuantisedLinear):
        return QuantisedLinear(in_order(product.weight, rows), bias, product.ranks)
    return Linear(product.weight[rows], bias, product.ranks)
