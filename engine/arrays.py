"""Arrays that cross from room to room: int32 numbers, blocks of token ids, log-probabilities."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Vectors = NDArray[np.float32]


def as_int32(numbers: Collection[int]) -> Int32:
    """Return the numbers [N], not to be written to. Raise OverflowError where one does not fit.

    By `struct`, which takes a third of the time that numpy takes for a list.
    """
    try:
        return np.frombuffer(struct.pack(f"{len(numbers)}i", *numbers), np.int32)
    except struct.error as error:
        raise OverflowError(str(error)) from None


def empty_int32() -> Int32:
    return np.empty(0, np.int32)


def as_blocks(tokens: Int32, block_size: int) -> NDArray[np.void]:
    """Return views [N // block_size] of the full blocks of `tokens` [N]."""
    full = len(tokens) // block_size * block_size
    return tokens[:full].view(f"V{block_size * tokens.itemsize}")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of N chosen tokens and the K best of each position."""

    chosen: NDArray[np.float32]  # [N]
    rank: Int32  # [N], 1 is best
    top_tokens: Int32  # [N, K], best first
    top_logprobs: NDArray[np.float32]  # [N, K]

    def of(self, rows: NDArray[np.intp], k: int) -> Logprobs:
        """Return those of some positions, with the k best of each."""
        best = self.top_tokens.take(rows, axis=0)[:, :k], self.top_logprobs.take(rows, axis=0)[:, :k]
        return Logprobs(self.chosen.take(rows), self.rank.take(rows), *best)


def joined(parts: list[Logprobs]) -> Logprobs:
    """Return those of all parts, which have equally many of the best, one after the other."""
    names = ("chosen", "rank", "top_tokens", "top_logprobs")
    return Logprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
