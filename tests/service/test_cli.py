"""Flags that would do nothing are refused, with the one that they need; what fails says so in one line."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest

from quire.cli import main
from quire.completion import Completion
from quire.engine.config import KVCacheDtype
from quire.engine.core import EngineCore
from quire.engine.device.runner import ModelRunner
from quire.engine.device.streams import DeviceResult
from quire.engine.schedule.plan import StepPlan
from quire.loadtest.offline import bench
from quire.loadtest.offline.columns import COLUMNS
from quire.loadtest.workloads import Work
from quire.offline_engine import OfflineEngine
from quire.service.demo import MODEL_FOLDER
from tests.engine.pooling import as_sentence_model
from tests.usage import usage_error

BENCH = ["bench", "--device", "cpu", "--swap-space", "0", "--runs", "1"]
GENERATE = [
    "generate",
    "--device",
    "cpu",
    "--swap-space",
    "0",
    "--max-model-len",
    "32",
    "--prompt",
    "A block",
    "--temperature",
    "0",
]


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["serve", "--advertise-url", "http://10.0.0.7:8000"], "--advertise-url"),
        (["serve", "--registry-lease", "5"], "--registry-lease"),
        (["route", "--replica", "http://10.0.0.7:8000", "--cache-seed", "secret"], "--cache-seed"),
    ],
)
def test_what_is_of_the_registry_needs_one(
    command: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(f"{flag} .*give --redis-url too", usage_error(command, capsys))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-events-config", "on"], "--kv-events-config must be JSON"),
        (
            ["--kv-events-config", '{"endpoint": "here"}'],
            "quire serve: --kv-events-config: endpoint must begin with tcp://",
        ),
        (
            ["--no-enable-prefix-caching", "--kv-events-config", '{"enable_kv_cache_events": true}'],
            "leave out --no-enable-prefix-caching",
        ),
    ],
)
def test_kv_events_that_cannot_be_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in usage_error(["serve", *flags], capsys)


def test_a_seed_that_seeds_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for command in ("serve", "generate", "bench", "doctor"):
        said = usage_error([command, "--seed", "0"], capsys)
        assert re.search(r"--seed \(0\) .* needs --load-format dummy; .* a request's own seed", said)
    with pytest.raises(SystemExit) as ended:
        main([*GENERATE, "--seed", "3", "--load-format", "dummy", "--max-tokens", "1"])
    assert ended.value.code == 0


def test_a_cache_that_there_is_not_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*GENERATE, "--kv-cache-dtype", "bfloat16"])
    monkeypatch.setenv("QUIRE_KV_CACHE_DTYPE", "fp12")
    with pytest.raises(SystemExit):
        main(GENERATE)
    by_flag, by_variable = (
        line for line in capsys.readouterr().err.splitlines() if line.startswith("quire ")
    )
    for told, name in ((by_flag, "--kv-cache-dtype"), (by_variable, "QUIRE_KV_CACHE_DTYPE must be one of")):
        assert name in told and all(each in told for each in get_args(KVCacheDtype))


@pytest.mark.parametrize("cache", get_args(KVCacheDtype))
def test_every_cache_that_there_is_generates(cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*GENERATE, "--kv-cache-dtype", cache, "--max-tokens", "4"])
    assert ended.value.code == 0 and capsys.readouterr().out.strip()


def test_what_was_measured_is_kept_when_a_trace_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("quire.loadtest.workloads.WORKLOADS", {"short": lambda: [Work([1] * 30, 4)]})
    full = Mock(side_effect=OSError("no space left"))
    monkeypatch.setattr("quire.loadtest.offline.profiling.profile_steps", full)
    results, traces = tmp_path / "results.jsonl", tmp_path / "traces"
    with pytest.raises(OSError, match="no space left"):
        main([*BENCH, "--workload", "short", "--result-file", str(results), "--profile", str(traces)])
    assert json.loads(results.read_text())["traced"] is None


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_a_model_that_pools_gives_no_text_which_its_configuration_says(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("A block"))
    for file in Path(MODEL_FOLDER).glob("*.json"):  # and no weights
        shutil.copy(file, tmp_path)
    said = usage_error([command, str(tmp_path), "--runner", "pooling"], capsys)
    assert said.endswith("--runner pooling gives vectors, and this command is for text: leave it out")
    as_sentence_model(tmp_path, "pooling_mode_lasttoken")
    told = f"quire {command}: .* made to embed or to score, .* quire serve run it, or give --runner generate"
    with pytest.raises(SystemExit, match=told):
        main([command, str(tmp_path)])


def test_requests_have_room_for_a_prompt_and_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    said = usage_error(["doctor", "--max-model-len", "1"], capsys)
    assert re.search(r"--max-model-len must be at least 2, .* got 1", said)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("0", "--max-tokens must be at least 1, got 0"),
        ("-7", "--max-tokens must be at least 1, got -7"),
        (
            "31",
            r"the prompt has \d+ tokens and --max-tokens is 31: together more than the 32 tokens that fit",
        ),
    ],
)
def test_as_many_tokens_are_generated_as_asked_for_or_it_is_refused(
    asked: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(f"^quire generate: {told}$", usage_error([*GENERATE, "--max-tokens", asked], capsys))


def test_as_many_tokens_are_generated_as_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(GENERATE)
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip()
    with pytest.raises(SystemExit, match="leaves no room for more in 32 tokens"):
        main([*GENERATE, "--prompt", "A block table " * 32])


@pytest.mark.parametrize(
    ("flags", "workloads", "limit"),
    [
        (["--num-gpu-blocks-override", "8"], "single", "needs up to 40 KV blocks .* there are only 8; .*"),
        (["--max-model-len", "500"], "single", "more than the 500 of --max-model-len; .*"),
        (["--max-num-seqs", "4"], "beam4,beam6", r"width is 6, .* \(--max-num-seqs\); .*"),
    ],
)
def test_a_workload_that_does_not_fit_is_refused_before_anything_is_measured(
    flags: list[str], workloads: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("quire.loadtest.offline.roofline.measure_ceilings")
    *_, name = workloads.split(",")
    with pytest.raises(SystemExit, match=f"^quire bench: request 0 of workload {name} does not .*{limit}$"):
        main([*BENCH, *flags, "--workload", workloads])


def test_a_workload_that_fails_is_told_in_one_line_after_those_that_did_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    execute = ModelRunner._execute

    def poisoned(self: ModelRunner, plan: StepPlan) -> DeviceResult:
        if 100 in plan.query_lens:
            raise RuntimeError("poison")
        return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "_execute", poisoned)
    short, long = Work([1] * 30, 4), Work([2] * 100, 4)
    monkeypatch.setattr(
        "quire.loadtest.workloads.WORKLOADS", {"good": lambda: [short], "bad": lambda: [short, long]}
    )
    results = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit) as ended:
        main([*BENCH, "--in-order", "--workload", "good,bad", "--result-file", str(results)])
    assert ended.value.code == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("quire bench"))
    assert "bad: a request of the workload failed: computing it raised RuntimeError" in line
    (result,) = (json.loads(line) for line in results.read_text().splitlines())
    assert (result["workload"], result["mode"]) == ("good", "offline")
    assert result["engine_out_tok_s"] > 0
    needs = result["step_needs"]
    assert (needs["prefill_tokens"], needs["decode_tokens"]) == (
        30 / 5,
        3 / 5,
    )  # the fifth step launches nothing


def test_what_is_measured_is_what_a_user_calls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside it the engine alone, as often."""
    work = [Work([1] * 30, 4), Work([2] * 20, 6, n=2)]
    monkeypatch.setattr("quire.loadtest.workloads.WORKLOADS", {"short": lambda: work})
    calls: list[str] = []
    answer, run_workload = OfflineEngine.answer, bench.run_workload

    def answered(self: OfflineEngine, *arguments: Any) -> list[list[Completion]]:
        calls.append("answer")
        answers = answer(self, *arguments)
        assert [[len(one.token_ids) for one in each] for each in answers] == [[4], [6, 6]]
        return answers

    def alone(core: EngineCore) -> bench.Run:
        calls.append("engine")
        return run_workload(core)

    monkeypatch.setattr(OfflineEngine, "answer", answered)
    monkeypatch.setattr(bench, "run_workload", alone)
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*BENCH[:-1], "2", "--workload", "short"])
    assert calls == ["engine", *["engine", "answer"] * 2]  # the first one warms up
    shown = capsys.readouterr().out
    assert all(f"{column} " in shown and meaning[:40] in shown for column, meaning in COLUMNS.items())
