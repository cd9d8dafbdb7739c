"""The sums over ranks that layers end in, as models and kernels take them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.kernels.parallel.buffers import SymmetricBuffers


class SumOverRanks(Protocol):
    """What a layer calls when every rank has a part of its sum.

    Every rank calls the same operations in the same order with the same shapes. Terms are added in the order
    of the ranks, so that all ranks get the same bits, whatever the batch. Nothing waits on the host for a
    GPU, and CUDA graphs can capture both.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x [T, H], contiguous; x may be overwritten."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add the sum of every rank's x [T, H] to residual [T, H] in place -> (RMSNorm of that, residual).

        The sum is rounded to the residual's dtype before it is added, as `pointwise.norm.add_rms_norm` does.
        x may be overwritten. Or x [S, T, H] in fp32: parts of this rank's term, which is rounded first.
        """
        ...


class Ranks(SumOverRanks, Protocol):
    """The ranks that a model is divided among, of which this process is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def buffers(self) -> SymmetricBuffers | None:
        """Return the memory that kernels of all ranks write to, if they reach each other's."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's x, contiguous, which all have in one shape: [size, *x.shape]."""
        ...


class PeerSums(Protocol):
    """Kernels that write to the other ranks' memory: `RankGroup` asks them first, and NCCL for the rest."""

    @property
    def buffers(self) -> SymmetricBuffers: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Do as `SumOverRanks.all_reduce`."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Do as `SumOverRanks.add_rms_norm`."""
        ...

    def supports(self, x: Tensor) -> bool:
        """Tell, by shape and dtype alone, whether x [T, H] is summed here: the same on every rank."""
        ...

    def close(self) -> None:
        """Give the memory back that peers read; nothing is under way then."""
        ...


def rounded(x: Tensor, like: Tensor) -> Tensor:
    """Return a rank's term [T, H] in the dtype of `like`; x may be that, or its parts [S, T, H] in fp32."""
    return x if x.dim() == like.dim() else x.sum(0).to(like.dtype)
