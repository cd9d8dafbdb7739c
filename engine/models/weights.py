"""A model's parameters: allocated once, on the device, and filled part by part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.engine.models.layers import LayerNorm
from quire.kernels.linear.linear import Linear


class Weights:
    """Allocates parameters for a model's constructor and knows which checkpoint tensor fills which part.

    `places` maps a checkpoint's tensor name to the view that it is copied into: a whole parameter, its slice
    of a fused one, or its transpose. `tied` maps a name that a checkpoint may repeat to the name it equals.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.places: dict[str, Tensor] = {}
        self.tied: dict[str, str] = {}
        self._drawn: list[Tensor] = []  # what `draw` fills: everything but norms

    @property
    def num_bytes(self) -> int:
        return sum(view.numel() * view.element_size() for view in self.places.values())

    def embedding(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix [rows, columns], also that of an output head."""
        weight = self._matrix(rows, columns)
        self.places[f"{name}.weight"] = weight
        return weight

    def linear(
        self, prefix: str, parts: dict[str, int], in_features: int, *, bias: bool, transposed: bool = False
    ) -> Linear:
        """Projections of one input fused into one: `parts` maps each one's name to its output size, in order.

        transposed: the checkpoint keeps [in, out] (GPT-2's Conv1D).
        """
        out_features = sum(parts.values())
        weight = self._matrix(out_features, in_features)
        offset = 0
        vector = self._allocate(out_features) if bias else None
        for part, size in parts.items():
            rows = weight[offset : offset + size]
            self.places[f"{prefix}.{part}.weight"] = rows.T if transposed else rows
            if vector is not None:
                self.places[f"{prefix}.{part}.bias"] = vector[offset : offset + size]
            offset += size
        return Linear(weight, vector)

    def rms_norm(self, name: str, size: int) -> Tensor:
        weight = torch.ones(size, dtype=self.dtype, device=self.device)
        self.places[f"{name}.weight"] = weight
        return weight

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        if not affine:
            return LayerNorm(None, None, eps)
        bias = torch.zeros(size, dtype=self.dtype, device=self.device)
        self.places[f"{name}.bias"] = bias
        return LayerNorm(self.rms_norm(name, size), bias, eps)

    def output_head(self, embedding_name: str, embedding: Tensor, *, tied: bool) -> Tensor:
        """Return `lm_head.weight` [vocab, hidden]: its own, or the embedding."""
        if not tied:
            return self.embedding("lm_head", *embedding.shape)
        self.tied["lm_head.weight"] = f"{embedding_name}.weight"
        return embedding

    def draw(self, seed: int) -> Iterable[Tensor]:
        """Fill with normal noise, std 0.02, the same for a seed; norms stay 1. Yields each one filled."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for parameter in self._drawn:
            yield parameter.normal_(std=0.02, generator=generator)

    def _matrix(self, rows: int, columns: int) -> Tensor:
        if (
            self.device.type == "cpu"
        ):  # by columns: one row of activations times such a weight is twice as fast
            return self._allocate(columns, rows).T
        return self._allocate(rows, columns)

    def _allocate(self, *shape: int) -> Tensor:
        parameter = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._drawn.append(parameter)
        return parameter
