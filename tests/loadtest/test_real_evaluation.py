"""The experiments on a real engine, in miniature: the demo model's configuration on any device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.device.limits import Limits
from quire.loadtest.attention_variants import VARIANTS
from quire.loadtest.client.lengths import LogNormal, Shape
from quire.loadtest.evaluation.real import (
    attention,
    case,
    evaluation,
    plan,
    steps,
    transfers,
    variants,
    whole_models,
)
from quire.loadtest.evaluation.real.__main__ import main
from quire.loadtest.evaluation.real.attention import AttentionTime, BlockSizeTime, measure_attention
from quire.loadtest.evaluation.real.case import CaseRun, measure
from quire.loadtest.evaluation.real.results import Measured, Results, read_measured
from quire.loadtest.evaluation.real.server import RealServer
from quire.loadtest.evaluation.real.transfers import TransferTime
from quire.loadtest.evaluation.real.variants import VariantTimes, measure_variants
from quire.loadtest.evaluation.real.ways import WayOutcome
from quire.loadtest.evaluation.real.whole_models import WAYS
from quire.loadtest.simulator.step_costs import FEATURES, read_records

MODEL = "service/demo/model"
COMMAND = ["--model", MODEL, "--kv-cache-memory-bytes", "12000000"]
TINY = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
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
            "OVERLOADS": dict.fromkeys(plan.OVERLOADS, 40.0),
            "OVERLOAD_SECONDS": 0.1,
            "PLAIN_WORKLOADS": ("ShareGPT",),
            "KNEE_STEPS": 1,
            "KNEE_SECONDS": (0.2, 0.25),
            "LONG_SECONDS": (0.3, 0.4),
            "WIDTHS": (2,),
            "PREFIXES": {"1 example": (40, 1.67)},
            "BLOCK_SIZES": (64,),
        },
        evaluation: {"DECODES": ((2, 20),), "PREFILLS": ((1, 40),)},
        whole_models: {"QWEN25_05B": TINY},
        attention: {
            "HEADS": {"some": (4, 2)},
            "BATCHES": (2,),
            "CONTEXTS": (64,),
            "WORKING_SET": 1,
            "SIZES": (1, 256),
            "SIZE_HEADS": "some",
            "SIZE_BATCH": 2,
        },
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
    parts = ["--parts", ",".join(evaluation.PARTS)]
    assert main([*COMMAND, "--output", str(tmp_path), *parts]) == 0, capsys.readouterr().out
    runs = [line.data for line in read_measured(tmp_path / "runs.jsonl", Measured[CaseRun])]
    sizes = [case for size in (16, 64) for case in plan.block_size_cases(size)]
    wanted = list(dict.fromkeys([*plan.overloads(), *plan.sharing(), *sizes]))
    assert [run.case for run in runs if run.case.share is None] == wanted
    assert [run.case.kind for run in runs if run.case.share] == ["paged", "oracle", "paged"]
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
        ("block-sizes", Measured[BlockSizeTime], 2),
        ("transfers", Measured[TransferTime], 2),
        ("variants", Measured[VariantTimes], 2),
        ("models", Measured[WayOutcome], len(WAYS) + 2),
    ):
        lines = read_measured(tmp_path / f"{name}.jsonl", kind)
        assert len(lines) == count and lines[0].commit and lines[0].command.startswith("python -m ")

    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main([*COMMAND, "--output", str(tmp_path), *parts, "--seconds", "0"]) == 0
    assert "left out" not in capsys.readouterr().out, "what is there is not measured again"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_fails_keeps_nothing_else_from_running(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr(evaluation, "record_steps", broken)
    assert main([*COMMAND, "--output", str(tmp_path), "--parts", "overloads,variants"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    first, *others = plan.overloads()
    assert failed == [f"failed: {first}"] and others, "an engine that does not start is not started again"
    assert {path.name for path in tmp_path.iterdir()} == {"variants.jsonl"}


def test_parts_may_be_measured_afresh(small: None, tmp_path: Path) -> None:
    variants_only = [*COMMAND, "--output", str(tmp_path), "--parts", "variants"]
    assert main(variants_only) == 0
    (tmp_path / "transfers.jsonl").write_text("as it was")
    before = (tmp_path / "variants.jsonl").read_bytes()
    assert main([*variants_only, "--afresh"]) == 0
    assert (tmp_path / "variants.jsonl").read_bytes() != before
    assert (tmp_path / "transfers.jsonl").read_text() == "as it was"
    with pytest.raises(SystemExit):
        main([*COMMAND, "--output", str(tmp_path), "--parts", "runs,lunch"])


def test_results_are_of_one_model_and_one_device(tmp_path: Path) -> None:
    time = TransferTime(tokens=1, block_size=1, whole_blocks=1.0, layer_by_layer=1.0, recompute=1.0)
    for _ in range(2):
        Results(tmp_path, "one", "cpu").add("transfers", time)
    assert Results(tmp_path, "one", "cpu").read("transfers", TransferTime) == [time, time]
    for model, device in (("other", "cpu"), ("one", "gpu")):
        with pytest.raises(ValueError, match="was measured with the"):
            Results(tmp_path, model, device).read("transfers", TransferTime)


def test_nothing_begins_that_would_take_too_long(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--output", str(tmp_path), "--seconds", "0"]) == 0
    out = capsys.readouterr().out
    for case_ in plan.overloads():
        assert f"left out for want of time: {case_}\n" in out
    assert "blocks of 64" in out and not list(tmp_path.iterdir())


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
