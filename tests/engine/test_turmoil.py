"""Every request gets its tokens whatever else comes at the same time."""

from __future__ import annotations

from collections import Counter

from tests.engine.nightly import NIGHTLY
from tests.engine.turmoil import Turmoil

SEEDS = 3000 if NIGHTLY else 60


def test_whatever_comes_together_every_request_gets_its_tokens() -> None:
    done: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            done += Turmoil(seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    reached = ["searches", "cached", "from host", "constrained", "stopped", "swaps", "recomputes"]
    reached += ["interrupts", "pinned", "pooled", "unfinite", "blamed"]
    assert all(done[name] for name in reached), done
