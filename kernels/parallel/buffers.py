"""The memory through which ranks send each other numbers, as kernels of one rank see it.

A rank writes into its peers' buffers and reads its own, so a number takes one way over the link. No flag says
that it is there: a buffer holds EMPTY wherever nothing has arrived (as NCCL's LL protocol and TensorRT-LLM's
"Lamport" kernels do), and a reader looks until none is left. That needs no barrier and no fence.

A rank has BUFFERS buffers, and a call uses the next one. It clears the one of the call before, which is safe:
a peer writes there again two calls later, and begins that call only when it has what this rank sends in
the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BUFFERS = 3
EMPTY = -(2**15)  # in each 16 bits: -0.0 in bf16 and fp16, and in fp32 -4.6e-41; 0.0 is sent in its place
MOST_PROGRAMS = 128  # of a call
NEVER = 2**31 - 1  # polls: ten minutes and more


@dataclass(frozen=True, slots=True)
class SymmetricBuffers:
    """One rank's buffers, and where its peers' are.

    own [BUFFERS, units] i16: what all ranks, this one too, write to for this rank.
    addresses [ranks] i64: of every rank's `own`, as this rank's device reaches it.
    state [MOST_PROGRAMS, 2] i32: for each program, which buffer the next call uses, and how many eights of
    units of the one before the last call used. On the device, so that graphs can be replayed.
    programs: how many a call has at most.
    most_polls: how often a program looks before it takes what is missing for NaN.
    mapping: what keeps the peers' memory mapped here, if anything has to.
    """

    rank: int
    own: Tensor
    addresses: Tensor
    state: Tensor
    programs: int = MOST_PROGRAMS
    most_polls: int = NEVER
    mapping: object = None

    @property
    def ranks(self) -> int:
        return len(self.addresses)

    @property
    def units(self) -> int:
        """Return how many 16-bit numbers a buffer takes."""
        return self.own.shape[1]


def make_buffers(
    rank: int,
    own: Tensor,
    addresses: list[int],
    *,
    programs: int = MOST_PROGRAMS,
    most_polls: int = NEVER,
    mapping: object = None,
) -> SymmetricBuffers:
    """Take a rank's memory [BUFFERS, units] i16, fill it, and return it with every rank's address of theirs.

    All ranks must have done so before any of them sends.
    """
    if own.dtype != torch.int16 or own.dim() != 2 or len(own) != BUFFERS or not own.is_contiguous():
        raise ValueError(f"buffers must be contiguous int16 [{BUFFERS}, units], not {own.dtype} {own.shape}")
    if own.shape[1] % 8:
        raise ValueError(f"a buffer must hold a multiple of 8 units of 16 bits, not {own.shape[1]}")
    if not 0 < programs <= MOST_PROGRAMS:
        raise ValueError(f"a call has 1 to {MOST_PROGRAMS} programs, not {programs}")
    own.fill_(EMPTY)
    return SymmetricBuffers(
        rank,
        own,
        torch.tensor(addresses, dtype=torch.int64, device=own.device),
        torch.zeros(MOST_PROGRAMS, 2, dtype=torch.int32, device=own.device),
        programs,
        most_polls,
        mapping,
    )


def buffers_on_one_device(
    ranks: int,
    units: int,
    device: torch.device,
    *,
    programs: int = MOST_PROGRAMS,
    most_polls: int = NEVER,
    empty: Callable[..., Tensor] = torch.empty,
) -> list[SymmetricBuffers]:
    """Return the buffers of ranks that share a device, one for each: for tests, and to time against a copy.

    Ranks that are streams of one GPU wait for each other, so all their programs must fit at once.
    """
    owned = [empty(BUFFERS, units, dtype=torch.int16, device=device) for _ in range(ranks)]
    addresses = [own.data_ptr() for own in owned]
    return [
        make_buffers(rank, own, addresses, programs=programs, most_polls=most_polls)
        for rank, own in enumerate(owned)
    ]
