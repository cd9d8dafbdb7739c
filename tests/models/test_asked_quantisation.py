"""What --quantization names is what a folder has; or fp8, to which weights of layers are rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.models.quantisation import ROUNDED
from quire.engine.models.reading import read_model
from tests.models import float8_folder, modelopt_folder, packed_folder
from tests.models.any_model import save_tiny
from tests.models.packed_folder import auto_round, awq, compressed, gptq
from tests.models.quantised_folder import configure

CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gptq": (gptq(), ("gptq", "gptq_marlin", "moe_wna16")),
    "awq": (awq(), ("awq", "awq_marlin", "moe_wna16")),
    "auto-round": (auto_round("auto_round"), ("auto-round", "auto_round", "inc")),
    "intel/auto-round": (
        auto_round("auto_round:gptq", quant_method="intel/auto-round"),
        ("intel/auto-round", "auto-round", "auto_round", "inc"),
    ),
    "compressed-tensors": (compressed("pack-quantized", strategy="channel"), ("compressed-tensors",)),
    "fp8": (float8_folder.fp8(), ("fp8",)),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, ("fbgemm_fp8",)),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("modelopt",)),
    "modelopt, NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("modelopt", "modelopt_fp4")),
    "modelopt, MXFP8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, ("modelopt", "modelopt_mxfp8")),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes",)),
    "hqq": ({"quant_method": "hqq"}, ("hqq",)),
    "gguf": ({"quant_method": "gguf"}, ("gguf",)),
}
EVERY = {name for _, names in CONFIGS.values() for name in names} | {"torchao", "mxfp4", ""}


@pytest.mark.parametrize("method", CONFIGS)
def test_a_folder_that_is_quantised_is_so_by_its_own_method_alone(method: str, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    config, names = CONFIGS[method]
    configure(tmp_path, config)
    expected = read_model(tmp_path)
    assert expected.quantised is not None
    for name in names:
        assert read_model(tmp_path, quantization=name) == expected
    own = config["quant_method"]
    for other in EVERY - {*names}:
        with pytest.raises(ValueError, match=f"--quantization {other}: .* by the method '{own}'.* {own}, or"):
            read_model(tmp_path, quantization=other)


def test_a_method_that_modelopts_own_file_names_counts(tmp_path: Path) -> None:
    form = modelopt_folder.FORMS["matrices"]
    folder, _ = modelopt_folder.save_modelopt("qwen3", form, tmp_path, "hf_quant_config.json")
    assert read_model(folder, quantization="modelopt") == read_model(folder)
    with pytest.raises(ValueError, match="are quantised by the method 'modelopt'"):
        read_model(folder, quantization="fp8")


def test_a_method_of_a_model_by_transformers_code_counts(tmp_path: Path) -> None:
    save_tiny("gpt_oss", tmp_path)
    configure(tmp_path, {"quant_method": "mxfp4"})
    assert read_model(tmp_path, quantization="mxfp4") == read_model(tmp_path)
    with pytest.raises(ValueError, match=r"--quantization fp8: .* are quantised by the method 'mxfp4'"):
        read_model(tmp_path, quantization="fp8")
    configure(tmp_path, packed_folder.gptq())
    assert read_model(tmp_path, "transformers", quantization="gptq_marlin").quantised is not None


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "gptq", "fp8_e4m3", ""])
def test_weights_that_are_not_quantised_are_by_fp8_alone(method: str, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    with pytest.raises(ValueError, match=f"--quantization {method}: .* are not quantised, .* fp8, a folder"):
        read_model(tmp_path, quantization=method)


@pytest.mark.parametrize(
    ("kind", "impl", "why"),
    [
        ("opt", "auto", "Mistral, Qwen2 and Qwen3, and OPTForCausalLM runs with learned positions: leave it"),
        ("gpt2", "auto", "Mistral, Qwen2 and Qwen3, and GPT2LMHeadModel runs with learned positions: leave"),
        ("gpt2", "transformers", "of linear layers and of experts, and GPT2LMHeadModel has none of these"),
    ],
)
def test_weights_of_other_models_are_not_rounded(kind: str, impl: Any, why: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    with pytest.raises(ValueError, match=f"--quantization fp8: .* {why}"):
        read_model(tmp_path, impl, quantization="fp8")


@pytest.mark.parametrize(("kind", "impl"), [("gemma2", "auto"), ("llama", "transformers")])
def test_weights_of_models_by_transformers_code_are_rounded(kind: str, impl: Any, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    asked, config = (read_model(tmp_path, impl, quantization=each) for each in ("fp8", None))
    assert asked == replace(config, quantised=ROUNDED)
    for other in ("gptq", "mxfp4"):
        with pytest.raises(ValueError, match=f"--quantization {other}: .* are not quantised, .* fp8, a fold"):
            read_model(tmp_path, impl, quantization=other)
