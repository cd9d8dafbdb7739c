"""Linear layers of a model by transformers' code whose weights stay in few bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.kernels.linear.alone import linear_reference
from quire.kernels.linear.operations import AnyLinear
from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.rows import alone
from quire.kernels.quantised.weight import QuantisedWeight, expand_reference


class KeptLinear(nn.Linear):
    """A layer that `keep_in` made of another, with that one's bias.

    kept: the weight, or a view of some rows of a larger one. dtype: of the numbers that it stands for.
    multiply: x [T, K] by a product -> [T, N].
    """

    kept: QuantisedWeight
    dtype: torch.dtype
    multiply: Callable[[Tensor, AnyLinear], Tensor]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return a copy of the numbers [N, K], for code that reads them."""
        return expand_reference(self.kept, self.dtype)

    @property
    def product(self) -> QuantisedLinear:
        """Return what multiplies by it."""
        return QuantisedLinear(alone(self.kept), None if self.bias is None else self.bias.data)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x [..., K] -> [..., N]."""
        rows, kept = x.reshape(-1, x.shape[-1]), self.kept
        beside = all(each is None or each.is_contiguous() for each in (kept.scales, kept.zeros))
        # Kernels may read scales before what copies them just ahead has ended, see `kernels.launch`.
        out = self.multiply(rows, self.product) if beside else self.product(rows)
        return out.view(*x.shape[:-1], out.shape[-1])

    def stand_alone(self) -> None:
        """Have scales and zero points of its own, where the weight is a view of some rows."""
        self.kept = alone(self.kept)


def keep_in(module: nn.Linear, weight: QuantisedWeight) -> None:
    """Have a layer keep a weight in place of its parameter, which may be nowhere yet."""
    dtype = module.weight.dtype
    del module.weight
    module.__class__ = KeptLinear
    assert isinstance(module, KeptLinear)
    module.kept, module.dtype, module.multiply = weight, dtype, linear_reference


def let_stand_alone(module: nn.Module) -> None:
    """Have layers within a module stand alone, which is left to its own code again."""
    for part in module.modules():
        if isinstance(part, KeptLinear):
            part.stand_alone()


def like_of(module: nn.Module) -> Tensor:
    """Return a tensor of the device and the dtype of a layer's weight."""
    if isinstance(module, KeptLinear):
        return torch.empty(0, dtype=module.dtype, device=module.kept.device)
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def release(module: nn.Linear) -> None:
    """Take the weight and the bias from a layer that others have in its stead."""
    if isinstance(module, KeptLinear):
        kept = module.kept
        module.kept = QuantisedWeight.empty(kept.format, 0, kept.inputs, kept.device)
    else:
        module.weight.data = module.weight.data.new_empty(0, module.in_features)
    if module.bias is not None:
        module.bias.data = module.bias.data.new_empty(0)
