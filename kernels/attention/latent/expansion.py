"""The matrix that makes keys and values of each head of a latent, and what it does in their stead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Expansion:
    """weight [H, plain + value, latent], contiguous; plain: numbers of a head's key that are not rotated."""

    weight: Tensor
    plain: int

    @property
    def heads(self) -> int:
        return self.weight.shape[0]

    @property
    def value(self) -> int:
        """Return how many numbers a head's value has."""
        return self.weight.shape[1] - self.plain

    @property
    def latent(self) -> int:
        return self.weight.shape[2]

    def queries(self, q: Tensor, out: Tensor) -> None:
        """Make of queries [H, T, plain + rotated] of keys those of latents, out [T, H, latent + rotated].

        `out` may be wider, and is zero there then.
        """
        into, width = out.transpose(0, 1), self.latent + q.shape[2] - self.plain
        torch.bmm(q[..., : self.plain], self.weight[:, : self.plain], out=into[..., : self.latent])
        into[..., self.latent : width] = q[..., self.plain :]
        if width < out.shape[2]:
            out[..., width:] = 0

    def values(self, attended: Tensor, out: Tensor) -> None:
        """Make of sums of latents [T, H, latent] those of values, out [T, H, value]."""
        torch.bmm(attended.transpose(0, 1), self.weight[:, self.plain :].mT, out=out.transpose(0, 1))

    def expand(self, latents: Tensor) -> Tensor:
        """Return keys and values of all heads [T, H, plain + value] of latents [T, latent]."""
        return (latents @ self.weight.flatten(0, 1).mT).unflatten(1, self.weight.shape[:2])
