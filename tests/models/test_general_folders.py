"""By whose code a folder's model runs, and folders that are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.engine.config import EngineConfig
from quire.engine.models.config import read_max_positions
from quire.engine.models.loader import load_model
from quire.engine.models.native_config import read_native
from quire.engine.models.reading import read_model
from quire.engine.parallel.group import OneOfRanks
from quire.engine.startup import start_engine
from quire.kernels.backend import torch_backend
from tests.models.any_model import compare, save_tiny
from tests.service import tiny_tokenizers


def test_native_decoders_are_taken_where_there_are_any(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    assert read_model(tmp_path) == read_native(tmp_path)
    general = read_model(tmp_path, "transformers")
    assert (
        general.implementation == "transformers" and general.cache_specs == read_model(tmp_path).cache_specs
    )
    save_tiny("phi", tmp_path)
    with pytest.raises(ValueError, match="architecture 'PhiForCausalLM' is not supported"):
        read_model(tmp_path, "native")


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("qwen3", {"rope_parameters": YARN}, "rope_type is 'yarn'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
    ],
)
def test_what_a_native_decoder_cannot_do_runs_by_transformers_code(
    kind: str, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    assert compare(kind, tmp_path, **change).outcome == "equal"
    assert read_model(tmp_path).implementation == "transformers"
    with pytest.raises(ValueError, match=named):
        read_model(tmp_path, "native")


def test_a_model_that_answers_about_images_alone_is_refused_as_such(tmp_path: Path) -> None:
    CONFIG_MAPPING["pix2struct"]().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"'pix2struct' cannot run .*: transformers has no causal language model"
    ):
        read_model(tmp_path)


def test_positions_are_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for given in ({"max_position_embeddings": 77}, {"n_positions": 77}, {"text_config": {"n_ctx": 77}}):
        path.write_text(json.dumps(given))
        assert read_max_positions(tmp_path) == 77
    path.write_text("{}")
    with pytest.raises(ValueError, match="max_position_embeddings must be there"):
        read_max_positions(tmp_path)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("missing", r"dense\.weight is missing"),
        ("unknown", "other is no weight"),
        ("shape", r"dense\.weight has shape \[3\], but config\.json asks for \[64, 64\]"),
        ("cut", r"model\.safetensors is not a complete safetensors file"),
        ("pickled", r"has neither model\.safetensors .*it has pytorch_model\.bin"),
        ("adapter", "has no weights of a model: adapter_config.json is of an adapter"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(changed: str, expected: str, tmp_path: Path) -> None:
    save_tiny("phi", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.self_attn.dense.weight"
    if changed == "missing":
        del weights[name]
    elif changed == "unknown":
        weights["other"] = weights[name].clone()
    elif changed == "shape":
        weights[name] = torch.zeros(3)
    save_file(weights, file, {"format": "pt"})
    if changed == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif changed == "pickled":
        file.rename(tmp_path / "pytorch_model.bin")
    elif changed == "adapter":
        file.unlink()
        (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=expected):
        start_engine(EngineConfig(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("wrong", [None, torch.zeros(3, 64)], ids=["missing", "shape"])
def test_experts_that_do_not_fit_together_are_refused_by_name(
    wrong: Tensor | None, rank: int | None, tmp_path: Path
) -> None:
    save_tiny("qwen3_moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    del weights[name]
    save_file(weights | ({} if wrong is None else {name: wrong}), tmp_path / "model.safetensors")
    config = read_model(tmp_path)
    expected = r"model\.layers\.1\.mlp\.experts\.(gate_up_proj cannot be made|3\.up_proj\.weight has shape)"
    with pytest.raises(ValueError, match=expected):
        load_model(
            tmp_path, config if rank is None else config.of_rank(2), torch_backend(), device="cpu",
            dtype=torch.float32, max_model_len=9, ranks=None if rank is None else OneOfRanks(rank, 2),
        )  # fmt: skip


SPARE = {
    "codegen": ["transformer.h.0.attn.causal_mask"],
    "gpt2": ["transformer.h.0.attn.masked_bias"],
    "gpt_bigcode": ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"],
    "openai-gpt": ["transformer.h.0.attn.bias"],
    "gpt_neo": ["transformer.h.0.attn.attention.bias", "transformer.h.0.attn.attention.masked_bias"],
    "gptj": ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"],
    "xglm": ["model.embed_positions.weights"],
    "glm4_moe": ["model.layers.4.eh_proj.weight", "model.layers.4.self_attn.q_proj.weight"],
}


@pytest.mark.parametrize("kind", SPARE)
def test_weights_that_text_is_not_computed_by_are_left_out(kind: str, tmp_path: Path) -> None:
    """Masks of older code's files, and layers that guess further tokens."""
    save_tiny(kind, tmp_path, **({"num_nextn_predict_layers": 1} if kind == "glm4_moe" else {}))
    file = tmp_path / "model.safetensors"
    weights = load_file(file) | {name: torch.zeros(3) for name in SPARE[kind]}
    save_file(weights, file, {"format": "pt"})
    arguments = {"device": "cpu", "dtype": torch.float32, "max_model_len": 64}
    load_model(tmp_path, read_model(tmp_path, "transformers"), torch_backend(), **arguments)
    save_file(weights | {"model.layers.5.other": torch.zeros(3)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.5\.other is no weight of the model"):
        load_model(tmp_path, read_model(tmp_path, "transformers"), torch_backend(), **arguments)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vocab_size": 97.0}, "cannot read it: .*vocab_size"),
        ({"is_causal": False}, "is_causal is false, so tokens see those after them"),
    ],
)
def test_configurations_that_cannot_be_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    save_tiny("stablelm", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=why):
        read_model(tmp_path)


def test_weights_of_attention_that_a_configuration_asks_for_are_not_given(tmp_path: Path) -> None:
    assert compare("phi", tmp_path, output_attentions=True).outcome == "equal"


def test_what_ends_a_text_may_stand_in_the_part_for_text_alone(tmp_path: Path) -> None:
    save_tiny("gemma3", tmp_path)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    described.pop("eos_token_id", None)
    path.write_text(
        json.dumps(described | {"text_config": described["text_config"] | {"eos_token_id": [5, 6]}})
    )
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert read_model(tmp_path).eos_token_ids == (5, 6)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_what_ends_a_text_is_a_token_that_the_model_has(kind: str, tmp_path: Path) -> None:
    """-1 stands for none, and a tokenizer may have more tokens than a model was given."""
    save_tiny(kind, tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    for told, ends in (([5, 97, -1], (5,)), (-1, ()), (97, ())):
        path.write_text(json.dumps(described | {"eos_token_id": told}))
        assert read_model(tmp_path).eos_token_ids == ends
    backend = tiny_tokenizers.byte_level()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert backend.token_to_id("<|end|>") > 97 and read_model(tmp_path).eos_token_ids == ()


def test_code_that_is_in_the_folder_is_not_run(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match="no model of type 'mine', and the code that auto_map names is not run"
    ):
        read_model(tmp_path)


def test_a_type_that_transformers_does_not_know_is_told_in_one_line(tmp_path: Path) -> None:
    for config in ({"model_type": "foo", "architectures": ["FooForCausalLM"]}, {}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        told = f"model type {config.get('model_type')!r} is not known to transformers"
        with pytest.raises(ValueError, match=rf"^\S+/config\.json: {told} 5[\d.]+; docs/models\.md .*$"):
            read_model(tmp_path)


def test_a_tokenizer_names_what_ends_a_text_where_the_configuration_does_not(tmp_path: Path) -> None:
    save_tiny("mpt", tmp_path, vocab_size=400)
    assert read_model(tmp_path).eos_token_ids == ()
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    assert read_model(tmp_path).eos_token_ids == (tokenizer.token_to_id("<|end|>"),)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_model(tmp_path).eos_token_ids == (7, 9)
