"""Scales for a KV cache of few bits, which folders may have beside quantised weights, are not used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models.quantisation import Measured
from quire.engine.models.reading import read_model
from tests.models import float8_folder, packed_folder
from tests.models.any_model import save_tiny
from tests.models.modelopt_folder import FORMS as MODELOPTS
from tests.models.modelopt_folder import save_modelopt, tell
from tests.models.quantised_folder import configure
from tests.models.test_float8 import assert_same, load

ATTENTION = "model.layers.0.self_attn"
FLOATS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def add(folder: Path, *names: str) -> None:
    """Add to a folder's weights what a cache would go by."""
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    tensors |= {f"{ATTENTION}.{name}": torch.tensor([0.5]) for name in names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def save(method: str, kind: str, scheme: Any, folder: Path) -> tuple[Path, Path]:
    """Save a random model with quantised weights, which names a cache, and with their numbers."""
    if method == "modelopt":
        quantised, plain = save_modelopt(kind, MODELOPTS["fours"], folder, "hf_quant_config.json")
        tell(quantised, MODELOPTS["fours"].own | {"kv_cache_quant_algo": scheme})
        return quantised, plain
    if method == "integers":
        form = packed_folder.FORMS["packed groups"]
        quantised, plain = packed_folder.save_packed(kind, form, folder)
        config = form.config
    else:
        floats = float8_folder.FORMS["matrices" if method == "fp8" else "compressed matrices"]
        quantised, plain = float8_folder.save_quantised(kind, floats, folder)
        config = floats.config
    configure(quantised, config | {"kv_cache_scheme": scheme})
    return quantised, plain


@pytest.mark.parametrize(
    ("method", "scheme", "cache", "names"),
    [
        ("fp8", "static", "static", ("kv_scale",)),
        ("floats", FLOATS, "floats of 8 bits", ("k_scale", "v_scale")),
        ("floats", FLOATS, "floats of 8 bits", ("k_proj.output_scale", "v_proj.output_scale")),
        ("integers", FLOATS | {"type": "int"}, "ints of 8 bits", ("k_scale", "k_zero_point", "v_scale")),
        ("modelopt", "FP8", "FP8", ("k_proj.k_scale", "v_proj.v_scale")),
        ("modelopt", "NVFP4_AFFINE", "NVFP4_AFFINE", ("k_proj.k_scale", "k_proj.k_bias", "v_proj.v_bias")),
    ],
)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_the_cache_has_the_format_that_is_asked_for_and_a_start_says_so(
    kind: str,
    method: str,
    scheme: Any,
    cache: str,
    names: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    quantised, plain = save(method, kind, scheme, tmp_path)
    add(quantised, *names)
    assert isinstance(read_model(quantised).quantised, Measured)
    with caplog.at_level(logging.INFO, "quire.engine"):
        assert_same(load(quantised)[0], load(plain)[0])
    assert f"KV cache of {cache}; they are not used: the cache has the format of" in caplog.text
    assert "are loaded as the float32 numbers that they stand for" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_cache_alone_leaves_weights_as_they_are(kind: str, tmp_path: Path) -> None:
    for folder in ("quantised", "plain"):
        save_tiny(kind, tmp_path / folder)
    tell(tmp_path / "quantised", {"quant_algo": None, "kv_cache_quant_algo": "FP8"})
    add(tmp_path / "quantised", "k_proj.k_scale", "v_proj.v_scale")
    assert read_model(tmp_path / "quantised").quantised == Measured(None, "FP8")
    assert_same(load(tmp_path / "quantised")[0], load(tmp_path / "plain")[0])


def test_scales_that_no_configuration_tells_of_are_refused_by_name(tmp_path: Path) -> None:
    quantised, _ = save_modelopt("qwen3", MODELOPTS["matrices"], tmp_path)
    add(quantised, "k_proj.k_scale")
    with pytest.raises(ValueError, match=f"{ATTENTION}.k_proj.k_scale is no weight"):
        load(quantised)
