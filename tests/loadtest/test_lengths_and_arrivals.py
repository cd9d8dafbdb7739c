"""Lengths have the means that they promise, and schedules the rate and the burstiness."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest.client.arrivals import arrival_times
from quire.loadtest.client.lengths import ALPACA, SHAREGPT, Fixed, LogNormal, Recorded, Shape, parse_shape


@pytest.mark.parametrize("lengths", [SHAREGPT.prompt, SHAREGPT.output, ALPACA.prompt, ALPACA.output])
def test_the_data_sets_means_come_out(lengths: LogNormal) -> None:
    rng = random.Random(1)
    drawn = np.array([lengths.draw(rng) for _ in range(20_000)])
    error = drawn.std() / len(drawn) ** 0.5
    assert abs(drawn.mean() - lengths.mean) < 4 * error + 0.05  # lengths are whole: rounding moves the mean
    assert drawn.min() >= lengths.least and drawn.max() <= lengths.most


@given(st.integers(1, 50), st.integers(100, 2000), st.floats(0.05, 0.95), st.floats(0.1, 1.5), st.integers(0))
def test_any_mean_between_the_ends_comes_out(
    least: int, most: int, share: float, sigma: float, seed: int
) -> None:
    lengths = LogNormal(least + share * (most - least), sigma, least, most)
    rng = random.Random(seed)
    drawn = np.array([lengths.draw(rng) for _ in range(2000)])
    assert abs(drawn.mean() - lengths.mean) < 6 * drawn.std() / len(drawn) ** 0.5 + 0.5


def test_recorded_lengths_are_pairs_that_a_model_takes() -> None:
    shape = parse_shape("sharegpt-recorded")
    assert isinstance(shape, Recorded)
    rng = random.Random(1)
    for prompt, output in (shape.draw(rng) for _ in range(1000)):
        assert min(prompt, output) >= 4 and prompt <= 1024 and prompt + output <= 2048
    short = Recorded(most_total=100).pairs
    assert set(short) < set(shape.pairs) and max(map(sum, short)) <= 100


def test_lengths_are_read_from_text() -> None:
    assert parse_shape("sharegpt") == SHAREGPT
    shape = parse_shape("128x64")
    assert isinstance(shape, Shape)
    assert (shape.prompt, shape.output) == (Fixed(128), Fixed(64))
    for wrong in ("", "128", "0x3", "-1x3", "axb", "shareGPT"):
        with pytest.raises(ValueError, match="128x64"):
            parse_shape(wrong)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = arrival_times(20_000, 8.0, burstiness, seed=3)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    variation = gaps.std() / gaps.mean()  # of a gamma distribution: 1 / sqrt(shape)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.05)


@given(st.integers(0, 50), st.floats(0.01, 1e4), st.floats(0.01, 100), st.integers(0, 2**32))
def test_a_schedule_depends_on_its_seed_only(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrival_times(count, rate, burstiness, seed)
    assert len(times) == count and (np.diff(times) >= 0).all()
    assert (times == arrival_times(count, rate, burstiness, seed)).all()


def test_impossible_schedules_are_refused() -> None:
    assert (arrival_times(3, float("inf"), 1.0, 0) == 0).all()
    with pytest.raises(ValueError, match="rate"):
        arrival_times(3, 0.0, 1.0, 0)
    with pytest.raises(ValueError, match="burstiness"):
        arrival_times(3, 1.0, 0.0, 0)
