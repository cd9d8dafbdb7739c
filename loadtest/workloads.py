"""The workloads on which engines are compared: fixed seeds, so that every engine gets the same requests.

End-of-sequence is ignored everywhere, so the work is fixed; greedy if nothing else is said. ShareGPT- and
Alpaca-like lengths are log-normal with the means that the PagedAttention paper gives (section 6.1): 161.31
and 337.99 tokens, 19.31 and 58.45 tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST_TOKEN, LAST_TOKEN = 300, 60000
TEMPERATURE = 0.6  # of what is sampled


@dataclass(frozen=True, slots=True)
class Work:
    """One request of a workload: a prompt and `output_len` tokens for each of its samples or beams."""

    prompt: list[int]
    output_len: int
    n: int = 1
    beam_width: int = 0  # 0: no beams
    temperature: float = 0.0

    @property
    def output_tokens(self) -> int:
        return self.output_len * (self.beam_width or self.n)


def mixed() -> list[Work]:
    """Make 256 prompts of 100 to 1024 tokens, outputs of 100 to 1024, sampled."""
    rng = random.Random(0)
    return [
        Work(_tokens(rng, rng.randint(100, 1024)), rng.randint(100, 1024), temperature=TEMPERATURE)
        for _ in range(256)
    ]


def sharegpt() -> list[Work]:
    """Make 1000 requests with ShareGPT's mean lengths."""
    rng = random.Random(1)
    return [
        Work(
            _tokens(rng, _length(rng, 161.31, sigma=1.1, most=1024)),
            _length(rng, 337.99, sigma=0.9, most=1024),
        )
        for _ in range(1000)
    ]


def alpaca() -> list[Work]:
    """Make 2000 requests with Alpaca's mean lengths."""
    rng = random.Random(2)
    return [
        Work(_tokens(rng, _length(rng, 19.31, sigma=0.6, most=256)), _length(rng, 58.45, sigma=0.9, most=512))
        for _ in range(2000)
    ]


def prefix() -> list[Work]:
    """Make 256 requests under one system prompt of 2048 tokens."""
    rng = random.Random(3)
    shared = _tokens(rng, 2048)
    return [Work(shared + _tokens(rng, 64), 64) for _ in range(256)]


def single() -> list[Work]:
    """Make one request alone."""
    return [Work(_tokens(random.Random(4), 128), 512)]


def few() -> list[Work]:
    """Make 8 equal requests, 512 tokens in and out."""
    rng = random.Random(9)
    return [Work(_tokens(rng, 512), 512) for _ in range(8)]


def prefill() -> list[Work]:
    """Make 16 long prompts, one token each."""
    rng = random.Random(5)
    return [Work(_tokens(rng, 8192), 1) for _ in range(16)]


def decode256() -> list[Work]:
    """Make 256 equal requests, so that all decode together."""
    rng = random.Random(6)
    return [Work(_tokens(rng, 1024), 256) for _ in range(256)]


def parallel8() -> list[Work]:
    """Make 64 prompts of 1024 tokens, eight samples of 256 tokens each."""
    rng = random.Random(7)
    return [Work(_tokens(rng, 1024), 256, n=8, temperature=TEMPERATURE) for _ in range(64)]


def beam4() -> list[Work]:
    """Make 64 prompts of 64 tokens, four beams of 64 tokens each."""
    return _beams(4)


def beam6() -> list[Work]:
    """Make the same with six beams."""
    return _beams(6)


def pressure() -> list[Work]:
    """Make the first 400 requests of `sharegpt`, for a server with too few blocks for them."""
    return sharegpt()[:400]


WORKLOADS: dict[str, Callable[[], list[Work]]] = {
    workload.__name__: workload
    for workload in (
        single,
        few,
        decode256,
        mixed,
        sharegpt,
        alpaca,
        prefix,
        prefill,
        parallel8,
        beam4,
        beam6,
        pressure,
    )
}


def _beams(width: int) -> list[Work]:
    rng = random.Random(8)
    return [Work(_tokens(rng, 64), 64, n=width, beam_width=width) for _ in range(64)]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def _length(rng: random.Random, mean: float, *, sigma: float, most: int) -> int:
    return max(4, min(most, int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))
