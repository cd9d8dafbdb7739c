"""`quire doctor --plan` prints which kernels compute a layer, on GPUs that need not be there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from quire.cli import main
from quire.commands.doctor import GPU_NAMES
from quire.kernels.gpu import KNOWN
from quire.kernels.linear.alone import plan_linear
from quire.kernels.linear.linear import Matrix
from quire.service.demo import MODEL_FOLDER
from tests.engine.pooling import as_sentence_model
from tests.models.kept_folder import save
from tests.usage import usage_error


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["doctor", MODEL_FOLDER, "--plan", *flags])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_the_flag_names_the_gpus_that_are_described() -> None:
    assert tuple(KNOWN) == GPU_NAMES


@pytest.mark.parametrize("gpu", GPU_NAMES)
def test_it_names_a_recipe_for_each_operation_of_each_step(
    capsys: pytest.CaptureFixture[str], gpu: str
) -> None:
    text = printed(capsys, "--gpu", gpu, "--dtype", "bfloat16")
    assert f" on {gpu}, in bfloat16, KV cache in " in text.splitlines()[0]
    steps = text.split("\n\n")[1:]
    assert steps[0].startswith("1 decode\n")
    for step in steps:
        named = [line[2:14].strip() for line in step.splitlines() if line.startswith("  ")]
        assert named in (
            ["project in", "attend", "project out", "gate", "down"],
            2 * ["project in", "attend", "project out", "gate", "down"],
        )
    assert "torch" not in text
    assert ("attention.hopper_decode" in text) == (gpu in ("H100", "H200", "B200", "RTX 5090"))


def test_what_memory_decides_is_that_of_the_gpu_that_is_named() -> None:
    weight = Matrix(6144, 2048)
    chosen = {name: plan_linear(gpu, torch.bfloat16, 1, weight).name for name, gpu in KNOWN.items()}
    assert [name for name, each in chosen.items() if "hopper_stream" in each] == ["H200"]


def test_products_are_by_the_weights_that_an_engine_with_these_flags_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["doctor", str(save("awq", tmp_path)), "--plan", "--gpu", "H100", "--dtype", "bfloat16"]
    plans = []
    for asked in ([], ["--quantized-weights", "keep"], ["--quantized-weights", "expand"]):
        with pytest.raises(SystemExit):
            main([*arguments, *asked])
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1]
    assert ["few bits" in plan for plan in plans] == [True, True, False]


def test_a_gpu_is_for_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--gpu goes with --plan" in usage_error(["doctor", MODEL_FOLDER, "--gpu", "H100"], capsys)


def test_a_plan_is_of_texts_as_long_as_a_model_that_pools_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_FOLDER, folder)
    as_sentence_model(folder, "pooling_mode_lasttoken")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    arguments = ["doctor", str(folder), "--plan", "--gpu", "H100"]
    for given in ([], ["--max-model-len", "100"]):
        with pytest.raises(SystemExit):
            main([*arguments, *given])
    of_folder, of_flag = capsys.readouterr().out.split(f"{folder} on ")[1:]
    assert of_folder == of_flag != printed(capsys, "--gpu", "H100").split(" on ", 1)[1]
    with pytest.raises(SystemExit, match=r"--max-model-len \(101\) is more than the 100 tokens of a text"):
        main([*arguments, "--max-model-len", "101"])


def test_there_is_no_plan_of_more_tokens_than_the_model_has() -> None:
    with pytest.raises(SystemExit, match=r"--max-model-len \(9999\) is more than the model's max_position"):
        main(["doctor", MODEL_FOLDER, "--plan", "--max-model-len", "9999"])
