"""Random steps of layers that keep states: all that there is of decodes and of chunks, in every one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE, PADS, StateStep

BLOCKS = 16


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step of `tokens`; the last few are of no decode and no chunk."""

    step: StateStep
    tokens: int

    @property
    def owned(self) -> torch.Tensor:
        """Tokens that get an output."""
        own = [token for first, count, *_ in self.step.in_order() for token in range(first, first + count)]
        return torch.tensor(sorted(own), dtype=torch.int64)

    @property
    def padding(self) -> torch.Tensor:
        """Tokens of decodes that pad, which get zeros."""
        return (self.step.after == PADS).nonzero()[:, 0]

    @property
    def written(self) -> set[int]:
        """Blocks that get states."""
        return {after for *_, after in self.step.in_order()} - {-1}

    @property
    def others(self) -> list[int]:
        """Blocks that get none."""
        return [block for block in range(BLOCKS) if block not in self.written]


def step_of(
    decodes: Iterable[tuple[int, int]], chunks: Iterable[tuple[int, int, int, int]], device: torch.device
) -> StateStep:
    """Return a step of decodes (before, after) and chunks as `StateStep` has them."""

    def numbers(values: Iterable[tuple[int, ...]], width: int) -> torch.Tensor:
        return torch.tensor([*values], dtype=torch.int32, device=device).view(-1, width)

    both, described = numbers(decodes, 2), numbers(chunks, 4)
    return StateStep(both[:, 0].contiguous(), both[:, 1].contiguous(), described, used_of(described))


def in_turn(
    decodes: Iterable[tuple[int, int]], chunks: Iterable[tuple[int, int, int]], device: torch.device
) -> DrawnStep:
    """Return a step of decodes (before, after) and chunks (tokens, before, after), which lie as they come."""
    first = [*decodes]
    end, described = len(first), []
    for count, before, after in chunks:
        described.append((end, count, before, after))
        end += count
    return DrawnStep(step_of(first, described, device), end)


def used_of(chunks: torch.Tensor) -> torch.Tensor:
    """Return [1] i32: behind which number of chunks [C, 4] all pad."""
    numbers = torch.arange(1, len(chunks) + 1, device=chunks.device)
    return (numbers * (chunks[:, 1] > 0)).amax().view(1).int() if len(chunks) else numbers.new_zeros(1).int()


def draw_step(device: torch.device, longest: int = CHUNK) -> DrawnStep:
    """Draw a step, by torch's seed, of chunks of up to `longest` tokens.

    Decodes go on in their own block, into another one, and from nothing, and two pad. Sequences begin with
    nothing, go on in place, from a block, and from one that another sequence left in this step; their chunks
    are carried, behind long ones and behind ones of a token or two, and leave states or not. Some pad, first,
    last and between. Sequences' tokens lie in another order than their chunks come in.
    """

    def size(least: int = 1, most: int = longest) -> int:
        return int(torch.randint(least, most + 1, ()))

    decodes = [(NO_STATE, PADS), (0, 0), (1, 2), (NO_STATE, 3), (1, PADS)]
    short = (size(1, 2), CARRIED, -1)
    sequences = [
        [(longest, NO_STATE, -1), (0, 0, 14), (longest, CARRIED, 4), (size(), CARRIED, 5)],
        [(size(1, 2), 6, 6), (size(), CARRIED, -1), short, short, (0, NO_STATE, -1), (size(), CARRIED, 6)],
        [(size(1, 2), 4, 7), (longest, CARRIED, 8)],
        [(size(), 9, -1), short, (size(1, 3), CARRIED, 10)],
        [(size(1, 2), NO_STATE, 11), (size(1, 2), CARRIED, 11), (size(), 11, 11)],
        [(1, 8, 12), (size(1, 3), 12, 12)],
    ]
    firsts, end = {}, len(decodes)
    for which in torch.randperm(len(sequences)).tolist():
        firsts[which] = end
        end += sum(count for count, *_ in sequences[which])
    chunks = [(0, 0, NO_STATE, 15), (0, 0, 0, -1)]
    for which, sequence in enumerate(sequences):
        first = firsts[which]
        for count, before, after in sequence:
            chunks.append((first, count, before, after))
            first += count
        if which == 2:
            chunks.append((0, 0, 1, 13))
    return DrawnStep(step_of(decodes, [*chunks, (0, 0, CARRIED, -1)], device), end + 3)
