"""Figures against their definitions, computed another way."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest.__main__ import main
from quire.loadtest.analysis.bootstrap import bootstrap_ratio, compare
from quire.loadtest.analysis.comparison import remarks
from quire.loadtest.analysis.knee import describe_knee, find_knee, rate_at
from quire.loadtest.analysis.report import render
from quire.loadtest.analysis.result import (
    Load,
    RunResult,
    SweepResult,
    read_result,
    read_results,
    write_result,
)
from quire.loadtest.analysis.summary import Slo, summarize
from quire.loadtest.client.counters import parse_counters
from quire.loadtest.client.records import Record
from quire.loadtest.client.target import Target

times = st.floats(0.001, 10)


@st.composite
def records(draw: st.DrawFn) -> Record:
    due = draw(st.floats(0, 100))
    sent = due + draw(st.floats(0, 0.02))
    first = sent + draw(times)
    tokens = draw(st.integers(1, 20))
    gaps = draw(st.lists(times, min_size=tokens - 1, max_size=tokens - 1))
    return Record(
        session=0,
        turn=0,
        due=due,
        sent=sent,
        first=first,
        last=first + sum(gaps),
        prompt_tokens=draw(st.integers(1, 50)),
        output_tokens=tokens,
        gaps=gaps,
        failure=draw(st.sampled_from(["", "", "", "timeout", "HTTP 429"])),
    )


@given(st.lists(records(), max_size=12), times, times)
def test_a_summary_is_what_its_names_say(given_: list[Record], ttft: float, tpot: float) -> None:
    summary = summarize(given_, Slo(ttft=ttft, tpot=tpot))
    good = [record for record in given_ if not record.failure]
    assert summary.requests == len(given_)
    assert sum(summary.failures.values()) == len(given_) - len(good)
    tokens = sum(record.output_tokens for record in good)
    if good:
        seconds = max(record.last for record in good) - min(record.due for record in given_)
        assert summary.output_rate * seconds == pytest.approx(tokens)
        assert summary.request_rate * seconds == pytest.approx(len(good))
        per_token = [(record.last - record.due) / record.output_tokens for record in good]
        assert summary.normalized_latency.mean == pytest.approx(sum(per_token) / len(per_token))
        assert summary.ttft.p50 == pytest.approx(np.median([record.first - record.due for record in good]))
        kept = [
            record
            for record in good
            if record.first - record.due <= ttft
            and (not record.gaps or sum(record.gaps) / len(record.gaps) <= tpot * (1 + 1e-12))
        ]
        assert summary.goodput * seconds <= len(kept) + 1e-6
        assert summary.goodput <= summary.request_rate + 1e-9
    else:
        assert summary.request_rate == summary.output_rate == summary.goodput == 0
    lags = sorted(record.sent - record.due for record in given_)
    assert summary.is_valid == (not lags or float(np.percentile(lags, 99)) <= 0.010)


@pytest.mark.parametrize(("tokens", "met"), [(1, True), (2, False)])
def test_tokens_that_came_all_at_once_meet_no_limit_of_their_time(tokens: int, met: bool) -> None:
    record = Record(session=0, turn=0, due=0.0, sent=0.0, first=1.0, last=1.0, output_tokens=tokens)
    assert Slo(tpot=5.0).is_met(record) == met
    assert Slo(ttft=5.0).is_met(record)


def line(rate: float) -> float:
    """A server that saturates at 10 requests a second."""
    return 1.0 + 99.0 * max(0.0, rate - 9.0)


def test_the_knee_is_where_latency_crosses_the_limit() -> None:
    points, limit, knee = find_knee(line, [1, 2, 4, 8, 16, 32], None, refine=4)
    assert limit == 3.0  # three times that of the lowest rate
    assert max(rate for rate, _ in points) == 16, "it goes on beyond the knee"
    true_knee = 9 + 2 / 99
    assert knee is not None and 8 < knee <= true_knee
    below = max(rate for rate, latency in points if latency <= limit)
    above = min(rate for rate, latency in points if latency > limit)
    assert below <= knee <= above and above / below < 1.05


def test_a_rate_that_was_not_sustained_is_beyond_the_knee() -> None:
    def failing(rate: float) -> float:
        return math.inf if rate > 5 else line(rate)

    points, limit, knee = find_knee(failing, [1, 2, 4, 8, 16], None, refine=2)
    assert knee == max(rate for rate, latency in points if latency < math.inf) < 5
    assert max(rate for rate, _ in points) == 8
    assert "were not sustained" in describe_knee(points, limit)
    assert find_knee(lambda rate: math.inf, [1, 2], None, refine=2) == ([(1, math.inf)], None, None)


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([(1, 1.0), (2, 3.0)], "1.5 requests/s, where the mean normalised latency crosses 2000.0 ms"),
        (
            [(1, 1.0), (2, 1.5)],
            "2 requests/s or more: at every rate the mean normalised latency was within 2",
        ),
        ([(1, 2.5)], "below the lowest rate, 1 requests/s"),
        ([(1, 1.0), (2, math.inf)], "1 requests/s: 2 requests/s were not sustained"),
        ([(1, math.inf)], "none: 1 requests/s, the lowest rate, were not sustained"),
    ],
)
def test_a_knee_is_said_with_what_it_rests_on(points: list[tuple[float, float]], said: str) -> None:
    assert describe_knee(points, 2.0).startswith(said)


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), max_size=8), st.floats(0.1, 100))
def test_a_knee_lies_within_what_was_measured(points: list[tuple[float, float]], limit: float) -> None:
    knee = rate_at(points, limit)
    if knee is None:
        assert not points or min(points)[1] > limit
    else:
        assert min(points)[0] <= knee <= max(points)[0]


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(100):
        first, second = rng.exponential(1.0, 80), rng.exponential(1.5, 120)
        ratio = bootstrap_ratio("", first, second, lambda samples: samples.mean(axis=1), seed=trial)
        assert ratio.low <= ratio.ratio <= ratio.high
        held += ratio.low <= 1.5 <= ratio.high
    assert 85 <= held <= 100


def run_of(seed: int, scale: float, rate: float | None = None) -> RunResult:
    rng = np.random.default_rng(seed)
    records = []
    for i in range(60):
        gaps = (scale * rng.exponential(0.01, 9)).tolist()
        first = i + scale * rng.exponential(0.1)
        records.append(
            Record(
                session=i,
                turn=0,
                due=float(i),
                sent=float(i),
                first=first,
                last=first + sum(gaps),
                prompt_tokens=5,
                output_tokens=10,
                gaps=gaps,
            )
        )
    records.append(Record(session=60, turn=0, due=60.0, sent=60.0, failure="timeout"))
    load = Load(
        mode="open", rate=rate, burstiness=1.0, sessions=61, processes=1, workload={"lengths": "5x10"}
    )
    target = Target(base_url="http://h", model="<m>")
    return RunResult.of(f"run {seed}", target, load, Slo(), ({"a": 1.0}, {"a": 3.0, "b": 0.0}), records)


def test_two_runs_are_told_apart_when_they_differ() -> None:
    same = compare(run_of(1, 1.0).records, run_of(2, 1.0).records)
    slower = compare(run_of(1, 1.0).records, run_of(3, 2.0).records)
    assert {ratio.name for ratio in same} >= {"TTFT mean", "TPOT mean", "normalised latency"}
    means = {ratio.name: ratio for ratio in slower}
    assert means["TPOT mean"].differs and means["TPOT mean"].low < 2 < means["TPOT mean"].high
    assert not {ratio.name: ratio for ratio in same}["TPOT mean"].differs


def test_a_comparison_says_what_makes_it_doubtful() -> None:
    run = run_of(1, 1.0, rate=1.0)
    (failures,) = remarks(run_of(4, 1.0, rate=1.0), with_records(run, run.records[:-1]))
    assert failures.startswith("the first run (run 4) had failures") and "1 × timeout of 61" in failures
    assert not list(remarks(*[with_records(run, run.records[:-1])] * 2))
    late = [Record(session=0, turn=0, due=0.0, sent=9.0, first=9.0, last=9.0, output_tokens=1)]
    assert any("the second run (run 1) is INVALID" in each for each in remarks(run, with_records(run, late)))
    faster = run_of(1, 1.0, rate=2.0)
    assert "the workloads differ: rate 1.0 and 2.0" in list(remarks(run, faster))
    with_ids = msgspec.structs.replace(run, target=msgspec.structs.replace(run.target, token_ids=True))
    assert "the workloads differ: token_ids False and True" in list(remarks(run, with_ids))
    assert any("nothing to compare" in each for each in remarks(with_records(run, run.records[-1:]), run))


@pytest.mark.parametrize("failed", ["first", "second"])
def test_a_run_without_successes_is_not_compared(
    failed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(1, 1.0)
    for name in ("first", "second"):
        bad = with_records(run, run.records[-1:])
        write_result(tmp_path / name, bad if name == failed else run)
    assert main(["compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 1
    out = capsys.readouterr().out
    assert f"the {failed} run (run 1) has no request that succeeded" in out and "TTFT" not in out


def with_records(run: RunResult, records: list[Record]) -> RunResult:
    return RunResult.of(run.label, run.target, run.load, run.slo, ({}, {}), records)


def test_results_come_back_from_their_files(tmp_path: Path) -> None:
    result = run_of(1, 1.0, rate=2.0)
    assert result.counters_change == {"a": 2.0}
    write_result(tmp_path / "one.json", result)
    assert read_result(tmp_path / "one.json") == result
    write_result(tmp_path / "sweep.json", SweepResult(runs=[result, result], latency_limit=0.1, knee=None))
    assert read_results(tmp_path / "sweep.json") == [result, result]
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(ValueError, match=r"wrong\.json"):
        read_result(tmp_path / "wrong.json")


def test_a_report_shows_every_run_and_escapes_names() -> None:
    runs = [run_of(1, 1.0, rate=1.0), run_of(2, 2.0, rate=2.0)]
    page = render("A <title>", runs, limit=0.1)
    assert page.count("<svg") == 4  # latency against rate, and three distributions
    assert "A &lt;title&gt;" in page and "&lt;m&gt;" in page and "<m>" not in page
    for run in runs:
        assert run.label in page
        assert f"{1e3 * run.summary.ttft.p99:.2f}" in page
    assert "timeout × 1" in page
    assert page == render("A <title>", runs, limit=0.1), "the same results give another page"


def test_kv_counters_are_read_from_prometheus_text() -> None:
    text = """
# TYPE quire_kv_blocks gauge
quire_kv_blocks{tier="device",state="free"} 7
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{model_name="m"} 3
# TYPE process_cpu_seconds counter
process_cpu_seconds_total 5
# TYPE quire_kv_seconds histogram
quire_kv_seconds_bucket{le="+Inf"} 1
quire_kv_seconds_sum 1
quire_kv_seconds_count 1
"""
    assert parse_counters(text) == {
        'quire_kv_blocks{state="free",tier="device"}': 7.0,
        "vllm:num_preemptions_total": 3.0,
    }
