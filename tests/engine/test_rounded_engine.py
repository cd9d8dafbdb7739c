"""An engine that rounds weights gives what one of a folder of the rounded numbers does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli import main
from quire.doctor import _size, describe, on_gpus
from quire.engine import rank
from quire.engine.config import EngineConfig
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_by_flags
from quire.engine.parallel.fit import weight_bytes
from quire.engine.parallel.leader import LeadingRunner
from quire.engine.startup import start_engine
from quire.kernels.backend import triton_backend
from quire.llm import LLM
from quire.service.demo import MODEL_FOLDER
from tests.engine.test_kept_engine import requests, run, start
from tests.models.kept_folder import KEEPING, LAYERS, load
from tests.models.rounded_folder import save_plain

FLAGS = ["--device", "cpu", "--max-model-len", "32", "--num-gpu-blocks-override", "8"]


@pytest.mark.parametrize("keeping", [True, False])
def test_tokens_are_those_of_a_folder_of_the_rounded_numbers(
    keeping: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, of_rounded = save_plain("qwen3", tmp_path)
    expected = run(start(of_rounded)[0], requests("greedy"))
    assert run(start(plain)[0], requests("greedy")) != expected
    if keeping:
        monkeypatch.setattr(rank, "torch_backend", lambda: KEEPING)
    core, bits = start(plain, quantization="fp8")
    assert bits == ((8,) if keeping else ())
    assert run(core, requests("greedy")) == expected
    core, bits = start(plain, quantization="fp8", quantized_weights="expand")
    assert bits == ()
    assert run(core, requests("greedy")) == expected


def test_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    plain, _ = save_plain("qwen3", tmp_path)
    expected = run(start(plain, quantization="fp8")[0], requests("greedy"))
    core, _ = start(plain, quantization="fp8", tensor_parallel_size=2)
    assert isinstance(core.runner, LeadingRunner)
    try:
        assert run(core, requests("greedy")) == expected
    finally:
        core.runner.leader.close()


def test_a_start_and_the_doctor_count_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = save_plain("qwen3", tmp_path)
    monkeypatch.setattr("quire.engine.rank.torch_backend", lambda: KEEPING)
    config = EngineConfig(
        model=str(plain), device="cpu", dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=20,
        preemption_mode="recompute", quantization="fp8",
    )  # fmt: skip
    info = start_engine(config)[1]
    assert info.kept_bits == (8,)
    model = read_model(plain, quantization="fp8")
    assert info.weight_bytes == load(plain, config=model, dtype=torch.bfloat16)[1]
    assert dict(describe(info))["weights"].endswith("in bfloat16, and those of layers' products in 8 bits")
    told = dict(on_gpus(plain, model, info, config, 8 << 30))
    for _ in ("here", "not here yet"):
        keep = keep_by_flags(config, plain, model, torch.bfloat16, triton_backend())
        for ranks, rows in ((1, 512 + 256 + 1024 + 256), (2, 256 + 256 + 512 + 256)):
            part = model.of_rank(ranks)
            size = weight_bytes(plain, part, 2, keep)
            assert size == weight_bytes(plain, part, 2) - LAYERS * (part.layer_weights - 4 * rows)
            assert told[f"on {ranks} GPU{'s' * (ranks > 1)}"].startswith(f"weights {_size(size)} each")
        (plain / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_method_that_the_folder_has_not_ends_a_start(ranks: int, tmp_path: Path) -> None:
    plain, _ = save_plain("qwen3", tmp_path)
    with pytest.raises(ValueError, match=r"--quantization gptq: weights of .* are not quantised"):
        start(plain, quantization="gptq", tensor_parallel_size=ranks)


def test_the_flag_reaches_the_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doctor(*flags: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            main(["doctor", MODEL_FOLDER, *FLAGS, *flags])
        return end.value.code, capsys.readouterr().out

    why = "verdict    no server starts here: --quantization gptq: weights of .* are not quantised"
    code, told = doctor("--quantization", "gptq")
    assert code == 1 and re.search(why, told)
    monkeypatch.setattr(rank, "torch_backend", lambda: KEEPING)
    code, told = doctor("--quantization", "fp8")
    assert code == 0 and "those of layers' products in 8 bits" in told
    monkeypatch.setenv("QUIRE_QUANTIZATION", "gptq")
    code, told = doctor()
    assert code == 1 and re.search(why, told)


def test_a_plan_is_by_rounded_weights(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*flags: str) -> str:
        with pytest.raises(SystemExit):
            main(["doctor", MODEL_FOLDER, "--plan", "--gpu", "H100", "--dtype", "bfloat16", *flags])
        return capsys.readouterr().out

    assert "few bits" in plan("--quantization", "fp8")
    assert plan("--quantization", "fp8", "--quantized-weights", "expand") == plan()


def test_the_setting_reaches_the_engine_of_an_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "torch_backend", lambda: KEEPING)
    given: dict[str, Any] = {"device": "cpu", "max_model_len": 32, "num_gpu_blocks_override": 8}
    with LLM(MODEL_FOLDER, quantization="fp8", **given) as llm:
        assert llm.info.kept_bits == (8,)
    with pytest.raises(ValueError, match=r"--quantization awq: weights of .* are not quantised"):
        LLM(MODEL_FOLDER, quantization="awq", **given)
