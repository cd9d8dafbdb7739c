"""How each device row samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How each device row samples: tensors [rows]. Temperature 0 is greedy; top_k 0 is off."""

    temperature: Tensor  # fp32
    top_p: Tensor  # fp32
    top_k: Tensor  # int32
    min_p: Tensor  # fp32
    seed: Tensor  # int64
    index: Tensor  # int32, the sequence's index within its group

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> SamplingState:
        """Return a state in which all rows are greedy."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            temperature=full(0, torch.float32),
            top_p=full(1, torch.float32),
            top_k=full(0, torch.int32),
            min_p=full(0, torch.float32),
            seed=full(0, torch.int64),
            index=full(0, torch.int32),
        )

    def select(self, rows: Tensor) -> SamplingState:
        """Return the state of `rows` [S], gathered."""
        rows = rows.long()
        return SamplingState(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            index=self.index[rows],
        )
