"""The scheduler and block manager against the oracle model: every token right under any schedule."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.nightly import NIGHTLY
from tests.engine.simulation import simulate

SEEDS = 3000 if NIGHTLY else 300  # of a chunk
CHUNKS, PUSHED_CHUNKS = (7, 2) if NIGHTLY else (2, 1)


def test_nobody_waits_for_a_transfer_of_no_blocks() -> None:
    """A group comes back from host memory whose blocks are all findable on the device."""
    simulate(2651)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_request_gets_its_tokens_under_any_schedule(chunk: int) -> None:
    done: Counter[str] = Counter()
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        try:
            done += simulate(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    reached = [
        "recomputes",
        "swaps",
        "copies",
        "cached",
        "from host",
        "evictions",
        "searches",
        "pinned",
        "constrained",
        "computing",
        "tails",
    ]
    assert min(done[name] for name in reached) > 10, f"the runs no longer reach what they are for: {done}"


@pytest.mark.parametrize("chunk", range(PUSHED_CHUNKS))
def test_tokens_are_right_whenever_anyone_yields(chunk: int) -> None:
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        try:
            simulate(seed, pushed=True)
        except AssertionError as error:
            error.add_note(f"seed {seed}, pushed")
            raise
