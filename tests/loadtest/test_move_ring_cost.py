"""What the comparison times runs; how much anything costs, no test says."""

from __future__ import annotations

from quire.loadtest.move_ring_cost import move_cost, step_cost


def test_what_is_timed_runs() -> None:
    assert all(seconds > 0 for seconds in {**move_cost(), **step_cost(4, 8)}.values())
