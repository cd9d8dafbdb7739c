"""Figures of real runs: a simulator in the engine's place, so that its own prediction must come out."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire.loadtest.__main__ import main
from quire.loadtest.client.lengths import LogNormal, Shape
from quire.loadtest.evaluation.commands import REAL
from quire.loadtest.evaluation.figure import Figure, Table
from quire.loadtest.evaluation.real import case, plan, rate_figures
from quire.loadtest.evaluation.real.attention import AttentionTime, BlockSizeTime
from quire.loadtest.evaluation.real.case import Case, CaseRun, Outcome, measure
from quire.loadtest.evaluation.real.prediction import (
    Compared,
    RealResults,
    SimulatedServer,
    alike,
    durations,
    read_real_results,
)
from quire.loadtest.evaluation.real.results import Results
from quire.loadtest.evaluation.real.transfers import TransferTime
from quire.loadtest.evaluation.real.variants import VariantTimes
from quire.loadtest.evaluation.real.ways import WayOutcome
from quire.loadtest.evaluation.setting import Setting
from quire.loadtest.simulator.step_costs import StepCosts, StepRecord

COSTS = StepCosts(seconds=[5e-3, 3e-5, 2e-5, 4e-8, 1e-8, 2e-6, 4e-5], source="made up")
BATCHES = ("FasterTransformer", "FasterTransformer, nothing padded")
SHORT = Shape(LogNormal(40, 0.8, 4, 200), LogNormal(30, 0.8, 4, 200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a run of all experiments writes, by a device that costs what COSTS says."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_results(tmp_path_factory.mktemp("results") / "opt-13b", monkeypatch)


def write_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {
        "SLOTS": 2048,
        "HOST_SLOTS": 1024,
        "MAX_NUM_SEQS": 64,
        "MAX_MODEL_LEN": 768,
        "MAX_BATCHED_TOKENS": 256,
        "OVERLOADS": dict.fromkeys(plan.OVERLOADS, 200.0),
        "OVERLOAD_SECONDS": 0.4,
        "WIDTHS": (2,),
    }.items():
        monkeypatch.setattr(plan, name, value)
    monkeypatch.setattr(case, "SHAPES", dict.fromkeys(case.SHAPES, SHORT))
    monkeypatch.setattr(
        case, "conversations", lambda count, seed: case.draw_sessions(case.Recipe(SHORT, count, seed))
    )
    results, server = Results(folder, "OPT-13B", "a made-up device"), SimulatedServer(COSTS)
    outcomes: dict[Case, Outcome] = {}
    for each in (*plan.overloads(), *plan.sharing(), *plan.block_size_cases(16), *plan.block_size_cases(64)):
        if each not in outcomes:
            outcomes[each] = measure(server, each)
            results.add("runs", CaseRun(case=each, outcome=outcomes[each]))
    for each in list(plan.overloads())[: len(plan.KINDS)]:
        for share in (0.7, 1.2):
            sustained = outcomes[each].sustained
            loop = plan.open_loop(each, sustained, share * sustained, (0.3, 0.6))
            results.add("runs", CaseRun(case=loop, outcome=measure(server, loop)))
    rng = random.Random(0)
    for size in (16, 64):
        features = [[1.0, *(rng.uniform(0, most) for most in (500, 64, 5e4, 1e5, 8, 8))] for _ in range(60)]
        results.add_steps(size, [StepRecord(each, seconds(each)) for each in features])
    way = {"blocks of 16": 12.0, "blocks of 128": 11.0, "blocks of 128 in order": 10.0, "torch": 9.0}
    for context in (64, 128):
        results.add(
            "attention",
            AttentionTime(
                heads="OPT-13B",
                batch=8,
                context=context,
                microseconds=way,
                max_error=dict.fromkeys(way, 1e-3),
            ),
        )
    for size, whole, pieces in ((8, 4.0, 60.0), (16, 3.0, 30.0), (32, 2.5, 15.0)):
        results.add(
            "transfers",
            TransferTime(
                tokens=1024, block_size=size, whole_blocks=whole, layer_by_layer=pieces, recompute=28.0
            ),
        )
    for size, microseconds in ((16, 10.0), (1, 40.0)):
        timed = BlockSizeTime(block_size=size, microseconds=microseconds, max_error=1e-3)
        results.add("block-sizes", timed)
    way_outcome = WayOutcome(way="v1", tokens_per_second=9.0, peak_mib=1.0, equal=8, requests=8)
    results.add("models", way_outcome)
    called = {"contiguous": 1.0, "Quire's kernel": 2.0}
    for is_decode in (True, False):
        results.add(
            "variants",
            VariantTimes(
                is_decode=is_decode, batch=2, length=60, called=called, on_device=called, max_error=called
            ),
        )
    return folder


def seconds(features: list[float]) -> float:
    return sum(cost * amount for cost, amount in zip(COSTS.seconds, features, strict=True))


def cell(table: Table, row: str, column: int) -> float:
    value = next(cells for cells in table.rows if cells[0] == row)[column]
    assert isinstance(value, float | int)
    return float(value)


def test_a_simulated_run_is_predicted_as_it_went(folder: Path) -> None:
    results = read_real_results(folder, Setting())
    assert isinstance(results, RealResults)
    assert "mean error of a step 0.0%" in results.describe() and "a made-up device" in results.describe()
    for run in results.runs:
        assert run.simulated.sustained == pytest.approx(run.real.sustained, rel=0.1), run.case
        assert run.simulated.mean_requests == pytest.approx(run.real.mean_requests, rel=0.1), run.case
    made = {name: figure(results) for name, figure in REAL.items()}
    assert all(isinstance(figure, Figure) and figure.tables for figure in made.values())
    (shares,) = made["fig2-real"].tables
    assert [row[0] for row in shares.rows] == ["Quire", "Orca (Oracle)", "Orca (Pow2)", "Orca (Max)"]
    assert [row[-1] for row in shares.rows] == [96.3, 38.2, 26.8, 20.4]
    overload, at_limit, *_ = made["fig12-real"].tables
    assert cell(overload, "Orca (Oracle)", 3) > 1 and overload.rows[1][-1] == "1.7–2.7"
    assert [row[0] for row in overload.rows] == [*(row[0] for row in at_limit.rows), *BATCHES]
    sizes = made["fig18b-real"].tables[1]
    assert [row[0] for row in sizes.rows] == [1.0, 16.0] and [row[2] for row in sizes.rows] == [300.0, 0.0]
    assert [row[1] for row in made["fig19-real"].tables[2].rows] == ["swap", "recompute"] * 2
    assert made["tutorials-real"].tables[0].rows == [["v1", 9.0, 1.0, "8 of 8"]]
    assert cell(made["fig18a-real"].tables[0], "8 × 64", 5) == pytest.approx(20)
    assert [row[1] for row in made["fig19-real"].tables[1].rows] == [8.0, 32.0]
    assert cell(made["fig16-real"].tables[0], "5 examples, 341 tokens", 8) == 3.58
    assert [row[1] for row in made["fig17-real"].tables[0].rows] == [row[0] for row in at_limit.rows[1:]]
    quantities = made["accuracy-real"].tables[0]
    beams = sum(run.case.beam_width > 0 for run in results.runs)
    for kind, count in (("without beams", len(results.runs) - beams), ("with beams", beams)):
        assert cell(quantities, f"rate sustained, {kind}", 1) == count
        assert cell(quantities, f"rate sustained, {kind}", 3) < 10


@pytest.mark.parametrize(("limit", "said"), [(1e9, True), (0.0, False)])
def test_a_rate_at_a_limit_that_no_run_went_beyond_is_said_to_be_the_least(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: float, said: bool
) -> None:
    monkeypatch.setattr(rate_figures, "latency_limit", lambda model: limit)
    results = read_real_results(folder, Setting())
    assert isinstance(results, RealResults)
    assert any("no rate that was tried" in note for note in rate_figures.fig12(results).notes) == said


def test_the_report_has_the_real_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = ["figures", "fig15-real", "fig18a-real", "--output", str(tmp_path / "report")]
    assert main([*figures, "--real", str(folder.parent)]) == 0
    text = (tmp_path / "report" / "README.md").read_text(encoding="utf-8")
    assert text.index("fig15-real") < text.index("fig18a-real") and "a made-up device" in text
    assert (tmp_path / "report" / "fig18a-real-1.svg").exists()
    assert main([*figures, "--real", str(tmp_path / "none")]) == 1
    assert "fig15-real needs runs of a real engine" in capsys.readouterr().err


def test_long_runs_stand_beside_long_ones_only(folder: Path) -> None:
    results = read_real_results(folder, Setting())
    assert results is not None

    def run_of(until: float) -> Compared:
        run = results.runs[0]
        return Compared(msgspec.structs.replace(run.case, until=until), run.real, run.simulated)

    some = alike({"paged": [run_of(60.0), run_of(12.0)], "oracle": [run_of(7.0)], "max": []})
    assert {kind: run.case.until for kind, run in some.items()} == {"paged": 12.0, "oracle": 7.0}
    assert durations(some.values()) == "A run takes 7 to 12 s; long ones are compared with long ones only."
    both = alike({"paged": [run_of(12.0), run_of(60.0)], "oracle": [run_of(60.0), run_of(7.0)]})
    assert durations(both.values()) == "Each run takes 60 s."


def test_what_was_not_measured_has_no_table(folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder, tmp_path / "some"))
    (folder / "attention.jsonl").unlink()
    (folder / "transfers.jsonl").unlink()
    lines = (folder / "runs.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "runs.jsonl").write_bytes(lines[0])
    results = read_real_results(folder, Setting())
    assert results is not None
    there = {name for name, figure in REAL.items() if figure(results).tables}
    assert there == {
        "fig2-real",
        "fig12-real",
        "fig13-real",
        "fig18b-real",
        "tutorials-real",
        "accuracy-real",
    }
