"""The experiments on a real engine, in miniature: the demo model's configuration on any device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.device.runner import Limits
from quire.loadtest.attention_variants import VARIANTS
from quire.loadtest.client.lengths import LogNormal, Shape
from quire.loadtest.evaluation.real import attention, case, evaluation, plan, steps, transfers, variants
from quire.loadtest.evaluation.real.__main__ import main
from quire.loadtest.evaluation.real.attention import AttentionTime, measure_attention
from quire.loadtest.evaluation.real.case import CaseRun, measure
from quire.loadtest.evaluation.real.results import Measured, read_measured
from quire.loadtest.evaluation.real.server import RealServer
from quire.loadtest.evaluation.real.transfers import TransferTime
from quire.loadtest.evaluation.real.variants import VariantTimes, measure_variants
from quire.loadtest.simulator.step_costs import FEATURES, read_records

MODEL = "service/demo/model"
SHORT = Shape(LogNormal(24, 0.3, 18, 40), LogNormal(5, 0.4, 3, 9))
CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for a few short sequences, and a few requests a run, which ends when all of them have."""
    run = RealServer.run
    monkeypatch.setattr(
        RealServer, "run", lambda self, sessions, system, until: run(self, sessions, system, 120)
    )
    for module, values in {
        plan: {
            "SLOTS": 512,
            "HOST_SLOTS": 256,
            "MAX_NUM_SEQS": 8,
            "MAX_MODEL_LEN": 128,
            "MAX_BATCHED_TOKENS": 64,
            "KINDS": ("paged", "oracle", "max"),
            "OVERLOADS": dict.fromkeys(plan.OVERLOADS, (40.0, 0.1)),
            "ARRIVALS": {"ShareGPT": (0.2, 0.25)},
            "SHARES": (1.0,),
            "WIDTHS": (2,),
            "PREFIXES": {"1 example": (40, 1.67)},
            "LARGER_BLOCKS": (64,),
        },
        evaluation: {
            "POOL_TOKENS": 2048,
            "SMALL_POOL_TOKENS": 1024,
            "DECODES": ((2, 20),),
            "PREFILLS": ((1, 40),),
        },
        attention: {"HEADS": {"some": (4, 2)}, "BATCHES": (2,), "CONTEXTS": (64,), "WORKING_SET": 1},
        steps: {"BATCHES": (1, 4), "CONTEXTS": (32, 4096), "PREFILLS": ((1, 16),), "EXTENDS": ()},
        transfers: {"SIZES": (4, 16), "TOKENS": 32},
        variants: {"HEADS": 2},
        case: {
            "SHAPES": dict.fromkeys(case.SHAPES, SHORT),
            "conversations": lambda count, seed: case.draw_sessions(case.Recipe(SHORT, count, seed)),
        },
    }.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def test_all_experiments(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", MODEL, "--output", str(tmp_path)]) == 0, capsys.readouterr().out
    runs = [line.data for line in read_measured(tmp_path / "runs.jsonl", Measured[CaseRun])]
    wanted = [*plan.overloads(), *plan.further_cases(), *plan.block_size_cases(64)]
    assert [run.case for run in runs if run.case.share is None] == wanted
    assert {run.case.kind for run in runs if run.case.share == 1.0} == {"paged", "oracle", "max"}
    for run in runs:
        assert (run.outcome.finished, run.outcome.unfinished) == (run.case.count, 0)
        assert run.outcome.normalized_latency > 0 and run.outcome.sustained > 0
        assert not run.outcome.shares or sum(run.outcome.shares.values()) == pytest.approx(100)
        if not run.case.prefix_caching:  # it depends on the time whether two requests share theirs
            assert (run.outcome.blocks_saved > 0) == (run.case.n > 1 or run.case.beam_width > 1)
    for size in (16, 64):
        records = read_records(tmp_path / f"steps-{size}.jsonl")
        assert len(records) > 8 and all(record.seconds > 0 for record in records)
    for name, kind, count in (
        ("attention", Measured[AttentionTime], 1),
        ("transfers", Measured[TransferTime], 2),
        ("variants", Measured[VariantTimes], 2),
    ):
        lines = read_measured(tmp_path / f"{name}.jsonl", kind)
        assert len(lines) == count and lines[0].commit and lines[0].command.startswith("python -m ")


def test_what_fails_keeps_nothing_else_from_running(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr(evaluation, "record_steps", broken)
    monkeypatch.setattr(plan, "overloads", lambda: iter([plan.overload("ShareGPT")]))
    monkeypatch.setattr(plan, "further_cases", lambda: iter([]))
    monkeypatch.setattr(plan, "LARGER_BLOCKS", ())
    assert main(["--model", MODEL, "--output", str(tmp_path)]) == 1
    assert "failed: times of single steps" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} >= {"runs.jsonl", "transfers.jsonl", "variants.jsonl"}


def test_parts_leave_the_files_of_the_others_alone(small: None, tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("as it was")
    assert main(["--model", MODEL, "--output", str(tmp_path), "--parts", "transfers,variants"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"runs.jsonl", "transfers.jsonl", "variants.jsonl"}
    assert (tmp_path / "runs.jsonl").read_text() == "as it was"
    with pytest.raises(SystemExit):
        main(["--model", MODEL, "--output", str(tmp_path), "--parts", "runs,lunch"])


def test_nothing_begins_that_would_take_too_long(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", MODEL, "--output", str(tmp_path), "--seconds", "0"]) == 0
    out = capsys.readouterr().out
    for case_ in plan.overloads():
        assert f"left out for want of time: {case_}\n" in out
    assert "blocks of 64" in out and not (tmp_path / "runs.jsonl").exists()


def test_a_system_that_needs_more_than_there_is_is_refused(small: None) -> None:
    server = RealServer(EngineConfig(model=MODEL, load_format="dummy", num_gpu_blocks_override=8))
    with pytest.raises(ValueError, match="Quire needs 32 blocks, and the engine has 8"):
        measure(server, plan.overload("ShareGPT"))


def test_steps_do_the_work_that_their_features_say(small: None) -> None:
    server = RealServer(
        EngineConfig(model=MODEL, load_format="dummy", num_gpu_blocks_override=16, max_num_seqs=4)
    )
    limits = Limits(4, 64, 128)
    server.runner.limits = limits
    records = steps.record_steps(server.runner)
    assert len(records) == 3 * steps.REPEATS, (
        "one step too long for the model is left out, and all mixed ones"
    )
    features = [dict(zip(FEATURES, record.features, strict=True)) for record in records]
    assert [each["context_tokens"] for each in features[:: steps.REPEATS]] == [32, 4 * 32, 0]
    assert [each["prefill_tokens"] for each in features[:: steps.REPEATS]] == [0, 0, 16]
    assert features[-1]["prefill_pairs"] == 16 * 17 / 2


def test_every_way_through_the_blocks_is_attention(small: None) -> None:
    timed = measure_attention(CPU, torch.float32, "some", batch=3, context=100)
    assert len(timed.microseconds) == len(timed.max_error) == 4
    assert max(timed.max_error.values()) < 1e-5
    for is_decode, length in ((True, 33), (False, 20)):
        tried = measure_variants(CPU, torch.float32, 2, length, is_decode=is_decode)
        assert set(tried.called) == set(tried.max_error) == {*VARIANTS, "Quire's kernel"}
        assert max(tried.max_error.values()) < 1e-5
        alone = measure_variants(CPU, torch.float32, 1, length, is_decode=is_decode)
        assert max(alone.max_error.values()) < 1e-5
        halves = measure_variants(CPU, torch.bfloat16, 2, length, is_decode=is_decode)
        assert max(halves.max_error.values()) < 0.05
