"""Sums over ranks by kernels that write into peers' memory, each by the way measured to be quicker."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.parallel.all_reduce import (
    DTYPES,
    one_shot,
    one_shot_norm,
    one_shot_units,
    two_shot,
    two_shot_units,
)
from quire.kernels.parallel.buffers import SymmetricBuffers
from quire.kernels.parallel.ranks import rounded
from quire.kernels.pointwise.norm import add_rms_norm


@dataclass(frozen=True, slots=True)
class Limits:
    """Up to how many bytes of a rank's x each way is taken; beyond both, it is for others.

    one_shot: of sums alone. fused: of sums with the residual's addition and the norm. two_shot: of either.
    """

    one_shot: int
    fused: int
    two_shot: int


class PeerKernels:
    """`ranks.PeerSums` over buffers that every rank writes to."""

    def __init__(self, buffers: SymmetricBuffers, limits: Limits) -> None:
        self._buffers: SymmetricBuffers | None = buffers
        self.limits = limits

    @property
    def buffers(self) -> SymmetricBuffers:
        if self._buffers is None:
            raise RuntimeError("the ranks' buffers were given back")
        return self._buffers

    def supports(self, x: Tensor) -> bool:
        """Tell, by shape and dtype alone, whether x [T, H] is summed here."""
        if x.dtype not in DTYPES or x.dim() != 2:
            return False
        return self._takes_one_shot(x, self.limits.one_shot) or self._takes_two_shot(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x [T, H], contiguous."""
        if self._takes_one_shot(x, self.limits.one_shot):
            return one_shot(x, self.buffers)
        return two_shot(x.contiguous(), self.buffers)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add the sum of every rank's x [T, H] to residual [T, H] in place -> (RMSNorm of that, residual).

        Or of x [S, T, H] in fp32, parts of a rank's term.
        """
        if self._takes_one_shot(residual, self.limits.fused):
            return one_shot_norm(x, residual, weight, eps, self.buffers)
        return add_rms_norm(self.all_reduce(rounded(x, residual)), residual, weight, eps)

    def close(self) -> None:
        """Give the memory back that peers write to; nothing is under way then."""
        self._buffers = None

    def _takes_one_shot(self, x: Tensor, limit: int) -> bool:
        buffers = self.buffers
        return x.nbytes <= limit and one_shot_units(x, buffers.ranks) <= buffers.units

    def _takes_two_shot(self, x: Tensor) -> bool:
        buffers = self.buffers
        fits = x.nbytes <= self.limits.two_shot and x.numel() % 8 == 0
        return fits and two_shot_units(x, buffers.ranks) <= buffers.units
