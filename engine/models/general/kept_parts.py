"""What stays in few bits of a model by transformers' code: weights of linear layers, and of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quire.engine.models.general.division.shares import Held
from quire.engine.models.general.expert_weights import ExpertWeights
from quire.engine.models.general.product_weights import ProductWeights
from quire.engine.models.kept_weights import of_experts_alone
from quire.kernels.quantised.weight import WeightFormat


class KeptParts:
    """Both, as one."""

    def __init__(self, formats: Mapping[str, WeightFormat], device: torch.device) -> None:
        """formats: of the weights that are kept, by their parameters' names, as `Kept` has them."""
        of_experts = {name: form for name, form in formats.items() if of_experts_alone([name])}
        of_products = {name: form for name, form in formats.items() if name not in of_experts}
        self.experts = ExpertWeights(of_experts, device)
        self._products = ProductWeights(of_products, device)

    @property
    def num_bytes(self) -> int:
        return self.experts.num_bytes + self._products.num_bytes

    def take(self, model: nn.Module, held: Mapping[str, Held]) -> None:
        """Take their parameters, which are nowhere yet, from a model; allocate what is kept instead.

        held: which share of them a rank has; the others are whole.
        """
        self.experts.take(model, held)
        self._products.take(model, held)

    def take_sources(self, model: nn.Module, slices: dict[str, Any], mapping: list[Any]) -> dict[str, Any]:
        """Return those tensors of files that these are not made of. The model is as before `take`."""
        others = self.experts.take_sources(model, slices, mapping)
        return self._products.take_sources(model, others, mapping)

    def fill(self) -> None:
        """Copy codes and scales out of files, which are open. Raises ValueError by name."""
        self.experts.fill()
        self._products.fill()

    def draw(self, seed: int, dtype: torch.dtype) -> None:
        """Fill them with normal noise in a dtype, rounded: the same for a seed on any rank."""
        self.experts.draw(seed, dtype)
        self._products.draw(seed, dtype)
