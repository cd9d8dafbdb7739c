"""Up to which size each way of summing over ranks is taken, by what was measured."""

from __future__ import annotations

from quire.engine.parallel.peers import limits_of, suited
from quire.kernels.parallel.peer_sums import Limits

SMALL, LARGE, HUGE = 1 << 16, 1 << 20, 1 << 24


def times(library: int, one_shot: int, fused: int, two_shot: int, norm: int = 2_000) -> dict[str, int]:
    return {"library": library, "one_shot": one_shot, "fused": fused, "two_shot": two_shot, "norm": norm}


def test_each_way_is_taken_as_far_as_it_is_the_quickest() -> None:
    found = limits_of(
        {
            SMALL: times(library=20_000, one_shot=5_000, fused=6_000, two_shot=9_000),
            LARGE: times(library=40_000, one_shot=30_000, fused=26_000, two_shot=20_000),
            HUGE: times(library=90_000, one_shot=400_000, fused=400_000, two_shot=95_000),
        }
    )
    assert found == Limits(one_shot=SMALL, fused=SMALL, two_shot=LARGE)


def test_two_ways_that_take_as_long_are_both_taken() -> None:
    """Which of them a measurement finds quicker is chance."""
    assert suited(times(library=10_000, one_shot=10_200, fused=12_200, two_shot=10_300)) == {
        "one_shot": True,
        "fused": True,
        "two_shot": True,
    }


def test_one_size_at_which_a_way_was_slow_by_chance_does_not_keep_it_from_larger_ones() -> None:
    quick = times(library=30_000, one_shot=5_000, fused=6_000, two_shot=9_000)
    slow_once = quick | {"one_shot": 5_500, "two_shot": 5_000}
    assert limits_of({SMALL: slow_once}).one_shot == 0
    assert limits_of({SMALL: slow_once, LARGE: quick}) == Limits(LARGE, LARGE, LARGE)


def test_what_has_no_room_is_not_taken() -> None:
    found = {SMALL: times(20_000, 5_000, 6_000, 9_000), HUGE: {"library": 9_000, "norm": 2_000}}
    assert limits_of(found) == Limits(one_shot=SMALL, fused=SMALL, two_shot=SMALL)
    assert limits_of({}) == Limits(0, 0, 0)
