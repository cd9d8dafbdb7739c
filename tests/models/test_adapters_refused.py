"""What an adapter has that cannot be merged is refused by name, and never left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.config import EngineConfig, ModelImpl
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from tests.models.adapter_folder import drawn, lora_of, save_adapter, weights
from tests.models.any_model import MAX_LEN, save_tiny

QUERIES = "model.layers.0.self_attn.q_proj"
WHOLE = lora_of(QUERIES, 64, 64)
A, B = f"{QUERIES}.lora_A.weight", f"{QUERIES}.lora_B.weight"
EMBEDDING = "model.embed_tokens"


def load(base: Path, adapter: Path, impl: ModelImpl = "auto") -> None:
    config = read_model(base, impl, adapter=adapter)
    load_model(base, config, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=MAX_LEN)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; of adapters only LORA"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type is 'PREFIX_TUNING'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"layer_replication": [[0, 2], [1, 4]]}, "layer_replication is set: it computes layers"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is set: .* invocation"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is set: .* stack experts"),
        ({"use_qalora": True}, "use_qalora is set"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set"),
        ({"kasa_config": {}, "arrow_config": {"top_k": 3}}, "arrow_config is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4': peft changes"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"some_new_thing": 1}, "some_new_thing is not known here, and may change"),
        ({"r": 0}, "r is 0; it must be a positive integer"),
        ({"r": "4"}, "r is '4'"),
        ({"lora_alpha": None, "use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj is 0; it must be a positive integer"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern is '\('; it must be a regular expression"),
        ({"rank_pattern": [3]}, r"rank_pattern is \[3\]"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; it must be a list"),
        ({"trainable_token_indices": [1, 1]}, r"trainable_token_indices is \[1, 1\]; .* each once"),
        ({"trainable_token_indices": {"embed_tokens": [-1]}}, r"trainable_token_indices is \[-1\]"),
    ],
)  # fmt: skip
def test_kinds_of_adapters(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, WHOLE, **fields)
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {why}"):
        read_model(save_base(tmp_path / "base"), adapter=adapter)


def save_base(folder: Path, **changes: Any) -> Path:
    save_tiny("llama", folder, **changes)
    return folder


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize(
    ("tensors", "fields", "why"),
    [
        ({}, {}, r"adapter_model\.safetensors cannot be merged: it has no tensors"),
        ({A: WHOLE[A]}, {}, rf"{QUERIES}\.weight: lora_B is missing"),
        ({B: WHOLE[B]}, {}, rf"{QUERIES}\.weight: lora_A is missing"),
        (WHOLE, {"r": 3}, rf"{QUERIES}\.weight: lora_A has shape \[4, 64\] and lora_B \[64, 4\], .* rank 3"),
        (WHOLE, {"rank_pattern": {"q_proj": 5}}, r"gives it rank 5"),
        (
            lora_of(QUERIES, 64, 32), {},
            rf"not fit its base model: {QUERIES}\.weight: lora_B and lora_A are of \[64, 32\] outputs and "
            r"inputs, and in the base model there are \[64, 64\]",
        ),
        (
            lora_of("model.layers.9.self_attn.q_proj", 64, 64), {},
            r"model\.layers\.9\.self_attn\.q_proj\.weight is no weight of the base model",
        ),
        ({"model.norm.bias": drawn(64)}, {"bias": "all"}, r"model\.norm\.bias is no weight of the base"),
        (
            WHOLE | {f"{QUERIES}.lora_B.bias": drawn(64)}, {"lora_bias": True},
            rf"{QUERIES}\.bias is no weight of the base model",
        ),
        (
            WHOLE | {f"{QUERIES}.lora_magnitude_vector": drawn(64)}, {},
            rf"{QUERIES}\.lora_magnitude_vector is of DoRA, and use_dora",
        ),
        (WHOLE, {"use_dora": True}, "lora_magnitude_vector is missing, and use_dora is true"),
        (
            WHOLE | {f"{QUERIES}.lora_magnitude_vector": drawn(32)}, {"use_dora": True},
            r"lora_magnitude_vector has shape \[32\], for 64 outputs",
        ),
        ({f"{QUERIES}.lora_magnitude_vector": drawn(64)}, {"use_dora": True}, "lora_A and lora_B are miss"),
        (WHOLE | {f"{QUERIES}.lora_diag": drawn(4)}, {}, rf"{QUERIES}\.lora_diag is not known"),
        (WHOLE | {f"{QUERIES}.hada_w1_a": drawn(4, 4)}, {}, "hada_w1_a is not known, and so would be left"),
        (WHOLE | {f"{QUERIES}.lora_A.bias": drawn(4)}, {}, r"lora_A\.bias is not known"),
        (
            WHOLE | {f"{EMBEDDING}.original_module.weight": drawn(97, 64)}, {},
            r"original_module\.weight is not known",
        ),
        (
            lora_of(f"{QUERIES}.base_layer", 64, 64), {}, "is of a layer in another adapter's layer",
        ),
        ({A: WHOLE[A].int(), B: WHOLE[B]}, {}, rf"{A} holds I32; only F64, F32, F16, BF16"),
        (
            {"lm_head.weight": drawn(99, 64)}, {"modules_to_save": ["lm_head"]},
            r"lm_head\.weight: it has shape \[99, 64\], and in the base model \[97, 64\]",
        ),
        (
            {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": drawn(2, 64)}, {},
            "is of tokens that trainable_token_indices of adapter_config.json does not name",
        ),
        (
            {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": drawn(2, 64)},
            {"trainable_token_indices": [1, 2, 3]}, r"rows have shape \[2, 64\], and .* names 3 tokens",
        ),
        (
            {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": drawn(2, 64)},
            {"trainable_token_indices": [1, 97]}, "it has rows of token 97, and the base model has 97 tokens",
        ),
        (
            WHOLE | {f"{QUERIES}.weight": drawn(64, 64)}, {"modules_to_save": ["q_proj"]},
            "more than one of LoRA, modules_to_save and trainable_token_indices",
        ),
    ],
)  # fmt: skip
def test_tensors(
    tensors: dict[str, Tensor], fields: dict[str, Any], why: str, impl: ModelImpl, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tensors, **fields)
    with pytest.raises(ValueError, match=why):
        load(save_base(tmp_path / "base"), adapter, impl)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_one_of_two_tied_weights_that_were_trained_as_one(impl: ModelImpl, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}
    adapter = save_adapter(tmp_path / "adapter", {"lm_head.weight": drawn(97, 64)}, **fields)
    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    with pytest.raises(
        ValueError, match="ensure_weight_tying is true, but the adapter has only one of the two"
    ):
        load(base, adapter, impl)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_two_weights_in_place_of_one(impl: ModelImpl, tmp_path: Path) -> None:
    both = {"lm_head.weight": drawn(97, 64), f"{EMBEDDING}.weight": drawn(97, 64)}
    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    load(base, save_adapter(tmp_path / "adapter", both), impl)
    adapter = save_adapter(tmp_path / "adapter", both | {"lm_head.weight": 2 * drawn(97, 64)})
    with pytest.raises(
        ValueError, match=r"lm_head\.weight and model\.embed_tokens\.weight are tied in its base"
    ):
        load(base, adapter, impl)


def test_a_weight_that_has_two_names(tmp_path: Path) -> None:
    adapter = save_adapter(
        tmp_path / "adapter", WHOLE | {name.removeprefix("model."): each for name, each in WHOLE.items()}
    )
    with pytest.raises(ValueError, match=r"q_proj\.weight is there by another name, too"):
        load(save_base(tmp_path / "base"), adapter)


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", {A: WHOLE[A], B: torch.full_like(WHOLE[B], torch.nan)})
    with pytest.raises(ValueError, match=rf"{QUERIES}\.weight stands for numbers that are not finite"):
        load(save_base(tmp_path / "base"), adapter)


def test_pickles(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", WHOLE)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors \(it has adapter_model\.bin\)"):
        load(save_base(tmp_path / "base"), adapter)


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", WHOLE)
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is not a complete safetensors file"):
        load(save_base(tmp_path / "base"), adapter)


def test_random_weights_have_none() -> None:
    with pytest.raises(
        ValueError, match="--lora mine is merged into weights, and --load-format dummy reads none"
    ):
        EngineConfig(model="any", lora="mine", load_format="dummy")


def test_experts_that_are_stacked_have_no_layers(tmp_path: Path) -> None:
    """Their names are those of modules that the model no longer has."""
    save_tiny("gpt_oss", tmp_path / "base")
    name = "model.layers.0.mlp.experts.0.down_proj"
    assert f"{name}.weight" not in weights(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", lora_of(name, 64, 32))
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.weight is no weight of the base model"):
        load(tmp_path / "base", adapter)


def test_a_folder_without_a_description(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no adapter_config\.json; give a folder that peft's"):
        read_model(save_base(tmp_path / "base"), adapter=tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(ValueError, match=r"adapter_config\.json must hold a JSON object"):
        read_model(tmp_path / "base", adapter=tmp_path)
