"""Draw lengths of prompts and outputs: distributions with a known mean, or ones that were recorded."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

RECORDED = Path(__file__).parent / "sharegpt_lengths.csv"  # written by quire.loadtest.sharegpt_lengths


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths, clipped to `least`..`most`; `mean` is the mean after clipping."""

    mean: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        return max(self.least, min(self.most, round(rng.lognormvariate(_mu(self), self.sigma))))


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    mean: int

    def draw(self, rng: random.Random) -> int:
        return self.mean


Lengths = LogNormal | Fixed


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a request's prompt and of its output, independent of each other."""

    prompt: Lengths
    output: Lengths

    def draw(self, rng: random.Random) -> Iterator[int]:
        """Yield the length of a prompt, then of its output, each drawn when it is asked for."""
        yield self.prompt.draw(rng)
        yield self.output.draw(rng)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of ShareGPT's first prompts and of the answers to them, as pairs, in tokens of GPT-2 and OPT.

    Only pairs that a model takes count, as in vLLM's benchmarks: no part is shorter than `least`, no prompt
    longer than `most_prompt`, and no two together longer than `most_total`.
    """

    least: int = 4
    most_prompt: int = 1024
    most_total: int = 2048

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return _recorded_pairs(self)

    def draw(self, rng: random.Random) -> Iterator[int]:
        """Yield the length of a prompt, then of its output."""
        yield from rng.choice(_recorded_pairs(self))


@lru_cache
def _recorded_pairs(recorded: Recorded) -> list[tuple[int, int]]:
    with RECORDED.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        pairs = [(int(prompt), int(output)) for prompt, output in rows]
    return [
        (prompt, output)
        for prompt, output in pairs
        if min(prompt, output) >= recorded.least
        and prompt <= recorded.most_prompt
        and prompt + output <= recorded.most_total
    ]


# Means of the two data sets (PagedAttention, section 6.1); the spreads are ours.
SHAREGPT = Shape(LogNormal(161.31, 1.1, 4, 1024), LogNormal(337.99, 0.9, 4, 1024))
ALPACA = Shape(LogNormal(19.31, 0.6, 4, 256), LogNormal(58.45, 0.9, 4, 512))
SHAPES: dict[str, Shape | Recorded] = {
    "sharegpt": SHAREGPT,
    "sharegpt-recorded": Recorded(),
    "alpaca": ALPACA,
}


def parse_shape(text: str) -> Shape | Recorded:
    """Parse one of SHAPES, or `128x64` for prompts of 128, outputs of 64 tokens. Raise ValueError."""
    if text in SHAPES:
        return SHAPES[text]
    prompt, cross, output = text.partition("x")
    if not (cross and prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output)):
        raise ValueError(f"lengths are {', '.join(SHAPES)} or PROMPTxOUTPUT such as 128x64, got {text!r}")
    return Shape(Fixed(int(prompt)), Fixed(int(output)))


@lru_cache
def _mu(lengths: LogNormal) -> float:
    """Find by bisection the mean of the logarithms for which the clipped mean is `lengths.mean`."""
    if not lengths.least < lengths.mean < lengths.most:
        raise ValueError(f"a mean of {lengths.mean} is not between {lengths.least} and {lengths.most}")
    low, high = math.log(lengths.least) - 8 * lengths.sigma, math.log(lengths.most) + 8 * lengths.sigma
    for _ in range(80):
        middle = (low + high) / 2
        if _clipped_mean(lengths, middle) < lengths.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _clipped_mean(lengths: LogNormal, mu: float) -> float:
    below = NormalDist(mu, lengths.sigma)
    # The part of the mean between the ends is that of a normal distribution moved by sigma squared.
    moved = NormalDist(mu + lengths.sigma**2, lengths.sigma)
    low, high = math.log(lengths.least), math.log(lengths.most)
    between = math.exp(mu + lengths.sigma**2 / 2) * (moved.cdf(high) - moved.cdf(low))
    return lengths.least * below.cdf(low) + between + lengths.most * (1 - below.cdf(high))
