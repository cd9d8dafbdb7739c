"""An adapter that PEFT wrote is merged into the weights of its base model as these are loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.engine.config import ModelImpl
from quire.engine.models.adapter_config import read_adapter
from quire.engine.models.loader import Model, load_model
from quire.engine.models.merging import Naming, merged_tensors
from quire.engine.models.reading import read_model
from quire.engine.models.weight_files import open_weights
from quire.kernels.backend import torch_backend
from tests.models.adapter_folder import (
    ALPHA,
    RANK,
    SCALE,
    delta_of,
    drawn,
    lora_of,
    save_adapter,
    save_both,
    save_changed,
    weights,
)
from tests.models.any_model import (
    LEAST_AGREEMENT,
    LENGTHS,
    MAX_LEN,
    STEPS,
    difference,
    prompts,
    save_tiny,
    two_layers,
)
from tests.models.divided_model import generate_divided
from tests.models.float8_folder import FORMS, save_quantised
from tests.models.paged_driver import PagedDriver

Generated = tuple[list[list[int]], list[Tensor]]
QUERIES, HEAD, EMBEDDING = "model.layers.0.self_attn.q_proj", "lm_head", "model.embed_tokens"
BOTH: tuple[ModelImpl, ...] = ("native", "transformers")


def load(
    base: Path, adapter: Path | None, impl: ModelImpl = "auto", dtype: torch.dtype = torch.float32
) -> Model:
    config = read_model(base, impl, adapter=adapter)
    model, _ = load_model(base, config, torch_backend(), device="cpu", dtype=dtype, max_model_len=MAX_LEN)
    return model


def save_base(kind: str, folder: Path, **changes: Any) -> None:
    save_tiny(kind, folder, **two_layers(kind), **changes)


def generate(model: Model) -> Generated:
    return PagedDriver(model, model.config, len(LENGTHS) + 1, MAX_LEN).generate(prompts(), STEPS)


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_merged(generated: Generated, merged: Path, base: Path) -> None:
    """Assert that these are answers of the merged model, as transformers runs it, and not of its base."""
    assert difference(generated, reference(merged)) < LEAST_AGREEMENT
    assert difference(generated, reference(base)) > 100 * LEAST_AGREEMENT


@pytest.mark.parametrize(
    ("kind", "impl"),
    [(kind, impl) for kind in ("llama", "gpt2") for impl in BOTH]
    + [("qwen3", "native"), ("opt", "native"), ("gemma2", "transformers"), ("phi3", "transformers")],
)
def test_answers_are_those_of_the_merged_model(kind: str, impl: ModelImpl, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_base(kind, base)
    adapter, merged = save_both(base, tmp_path, inputs_first=kind == "gpt2")
    assert_merged(generate(load(base, adapter, impl)), merged, base)


@pytest.mark.parametrize("impl", BOTH)
def test_a_start_says_what_is_merged_into_what(
    impl: ModelImpl, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "base"
    save_base("llama", base)
    adapter = save_adapter(tmp_path / "adapter", lora_of(QUERIES, 64, 64), "owner/base")
    with caplog.at_level(logging.INFO, "quire.engine"):
        load(base, adapter, impl)
    assert f"{adapter}, made for owner/base, is merged into weights of {base}" in caplog.messages


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "minimax_m2", "deepseek_v3"])
def test_experts_that_files_have_apart_are_changed_one_by_one(kind: str, tmp_path: Path) -> None:
    """By the names that they had when they were modules, as older versions of peft wrote them."""
    base = tmp_path / "base"
    save_base(kind, base)
    adapter, merged = save_both(base, tmp_path)
    assert any(
        "experts.3" in name for name in open_weights(adapter / "adapter_model.safetensors").offset_keys()
    )
    assert_merged(generate(load(base, adapter)), merged, base)


@pytest.mark.parametrize(
    ("kind", "impl", "ranks"),
    [("llama", "native", 2), ("gpt2", "native", 2), ("llama", "transformers", 2), ("mixtral", "auto", 2)],
)
def test_ranks_add_their_shares(kind: str, impl: ModelImpl, ranks: int, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_base(kind, base)
    adapter, merged = save_both(base, tmp_path, inputs_first=kind == "gpt2")
    for generated in generate_divided(base, read_model(base, impl, adapter=adapter).of_rank(ranks), ranks):
        assert_merged(generated, merged, base)


@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize("form", ["blocks", "rows"])
def test_an_adapter_is_added_to_what_quantised_weights_stand_for(
    impl: ModelImpl, form: str, tmp_path: Path
) -> None:
    quantised, plain = save_quantised("llama", FORMS[form], tmp_path)
    adapter, merged = save_both(plain, tmp_path)
    assert_merged(generate(load(quantised, adapter, impl)), merged, plain)


def scaled(
    module: str, outputs: int, inputs: int, scale: float, rank: int = RANK
) -> tuple[dict[str, Tensor], Tensor]:
    tensors = lora_of(module, outputs, inputs, rank)
    return tensors, delta_of(tensors, module, scale)


@pytest.mark.parametrize("impl", BOTH)
def test_what_quantised_weights_stand_for_is_not_rounded_before(impl: ModelImpl, tmp_path: Path) -> None:
    quantised, plain = save_quantised("llama", FORMS["blocks"], tmp_path)
    adapter, merged = save_both(plain, tmp_path)
    ours, expected = (
        load(*folders, impl, torch.bfloat16) for folders in ((quantised, adapter), (merged, None))
    )
    assert all(map(torch.equal, generate(ours)[1], generate(expected)[1]))


@pytest.mark.parametrize(
    ("fields", "rank", "scale"),
    [
        ({}, RANK, ALPHA / RANK),
        ({"use_rslora": True}, RANK, ALPHA / RANK**0.5),
        ({"lora_alpha": 3.5}, RANK, 3.5 / RANK),
        ({"rank_pattern": {"q_proj": 9}}, 9, ALPHA / 9),
        ({"rank_pattern": {"k_proj": 9, ".*layers.0.self_attn.q_proj": 3}}, 3, ALPHA / 3),
        ({"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 20}}, RANK, 20 / RANK),
        ({"rank_pattern": {"proj": 9, "layers.1.self_attn.q_proj": 9}}, RANK, ALPHA / RANK),
        ({"alpha_pattern": {"q_proj": 2}, "rank_pattern": {"q_proj": 9}, "use_rslora": True}, 9, 2 / 3),
    ],
)  # fmt: skip
def test_products_are_scaled_as_peft_scales_them(
    fields: dict[str, Any], rank: int, scale: float, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    save_base("llama", base)
    tensors, delta = scaled(QUERIES, 64, 64, scale, rank)
    adapter = save_adapter(tmp_path / "adapter", tensors, **fields)
    (read,) = merged_of(base, adapter).values()
    torch.testing.assert_close(read, weights(base)[f"{QUERIES}.weight"] + delta, atol=1e-6, rtol=1e-6)


def merged_of(
    base: Path,
    adapter: Path,
    dtype: torch.dtype = torch.float32,
    inputs_first: frozenset[str] = frozenset(),
    index: Any = ...,
) -> dict[str, Tensor]:
    """Return what an adapter makes of an untied model's weights, or of parts of them."""
    file = open_weights(base / "model.safetensors")
    slices = {name: file.get_slice(name) for name in file.offset_keys()}
    naming = Naming(of=str, has=slices.__contains__, inputs_first=inputs_first, tied=None)
    merged = merged_tensors(slices, read_adapter(adapter), naming, dtype, torch.device("cpu"))
    return {name: each[index] for name, each in merged.items()}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("inputs_first", [False, True])
def test_parts_are_those_of_the_whole(
    dora: bool, inputs_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few numbers are computed at once, and whichever dimension is divided."""
    base = tmp_path / "base"
    save_base("llama", base)
    name = "model.layers.0.mlp.down_proj"  # [64, 96]
    tensors = lora_of(name, *((96, 64) if inputs_first else (64, 96)))
    if dora:
        tensors[f"{name}.lora_magnitude_vector"] = drawn(96 if inputs_first else 64).abs()
    adapter = save_adapter(tmp_path / "adapter", tensors, use_dora=dora)
    first = frozenset({f"{name}.weight"} if inputs_first else ())
    (whole,) = merged_of(base, adapter, inputs_first=first).values()
    monkeypatch.setattr("quire.engine.models.merged_tensor._PIECE", 500)
    for index in (..., slice(5, 40), (slice(None), slice(7, 90)), (slice(3, 4), slice(1, 2)), slice(8, 8)):
        (part,) = merged_of(base, adapter, inputs_first=first, index=index).values()
        torch.testing.assert_close(part, whole[index], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("inputs_first", [False, True])
def test_dora_gives_outputs_lengths_of_their_own(inputs_first: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_base("llama", base)
    name = "model.layers.0.mlp.down_proj"
    outputs, inputs = (96, 64) if inputs_first else (64, 96)
    tensors, lengths = lora_of(name, outputs, inputs), drawn(outputs).abs()
    weight = weights(base)[f"{name}.weight"].double()
    moved = (weight.T if inputs_first else weight) + delta_of(tensors, name).double()
    expected = lengths[:, None] * moved / moved.norm(dim=1, keepdim=True)
    adapter = save_adapter(
        tmp_path / "adapter", tensors | {f"{name}.lora_magnitude_vector": lengths}, use_dora=True
    )
    first = frozenset({f"{name}.weight"} if inputs_first else ())
    (read,) = merged_of(base, adapter, inputs_first=first).values()
    torch.testing.assert_close(read.double(), expected.T if inputs_first else expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """And not the base model's weights before."""
    base = tmp_path / "base"
    save_base("llama", base)
    tensors = lora_of(QUERIES, 64, 64)
    adapter = save_adapter(tmp_path / "adapter", tensors)
    weight, delta = weights(base)[f"{QUERIES}.weight"], delta_of(tensors, QUERIES)
    (read,) = merged_of(base, adapter, dtype).values()
    assert read.dtype == dtype
    expected = (weight + delta).to(dtype)
    assert (read != expected).sum() <= 1  # last bits of a product may be others
    assert (expected != (weight.to(dtype) + delta).to(dtype)).sum() > 10


@pytest.mark.parametrize("impl", BOTH)
def test_biases_are_replaced_and_added_to(impl: ModelImpl, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_base("gpt2", base)
    attention, norm = "transformer.h.0.attn.c_attn", "transformer.ln_f"
    up = "transformer.h.1.mlp.c_fc"
    tensors = {
        f"{attention}.base_layer.bias": drawn(192),
        f"{norm}.bias": drawn(64),
        f"{up}.lora_B.bias": drawn(256),
        **lora_of(up, 256, 64),
    }
    held = weights(base)
    changed = {
        f"{attention}.bias": drawn(192),
        f"{norm}.bias": drawn(64),
        f"{up}.bias": held[f"{up}.bias"] + drawn(256) * SCALE,
        f"{up}.weight": held[f"{up}.weight"] + delta_of(tensors, up).T,
    }
    adapter = save_adapter(tmp_path / "adapter", tensors, bias="all", lora_bias=True)
    merged = save_changed(base, tmp_path / "merged", changed)
    assert_merged(generate(load(base, adapter, impl)), merged, base)


def head_lora() -> dict[str, Tensor]:
    return lora_of(HEAD, 97, 64)


def embedding_lora() -> dict[str, Tensor]:
    return {
        f"{EMBEDDING}.lora_embedding_A": drawn(RANK, 97),
        f"{EMBEDDING}.lora_embedding_B": drawn(64, RANK),
    }


def embedding_delta() -> Tensor:
    return (drawn(64, RANK) @ drawn(RANK, 97) * SCALE).T


def with_rows(weight: Tensor) -> Tensor:
    return weight.index_copy(0, torch.tensor([5, 3, 90]), drawn(3, 64))


TOKENS = {"trainable_token_indices": [5, 3, 90]}
ROWS = {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": drawn(3, 64)}
HEAD_ROWS = {f"{HEAD}.token_adapter.trainable_tokens_delta": drawn(3, 64)}
OTHER = drawn(97, 64)
# Tensors, fields, and what becomes of the embedding and of the head, given what both are.
Becomes = Callable[[Tensor], Tensor]
ENDS: dict[str, tuple[dict[str, Tensor], dict[str, Any], Becomes, Becomes]] = {
    "head": (head_lora(), {}, lambda w: w, lambda w: w + delta_of(head_lora(), HEAD)),
    "embedding": (embedding_lora(), {}, lambda w: w + embedding_delta(), lambda w: w),
    "both": (
        head_lora() | embedding_lora(), {"ensure_weight_tying": True},
        lambda w: w + embedding_delta(), lambda w: w + delta_of(head_lora(), HEAD),
    ),
    "saved head": ({f"{HEAD}.weight": OTHER}, {"modules_to_save": ["lm_head"]}, lambda w: w, lambda w: OTHER),
    "saved embedding": (
        {f"{EMBEDDING}.weight": OTHER}, {"modules_to_save": ["embed_tokens"]}, lambda w: OTHER, lambda w: w,
    ),
    "base beside": (
        embedding_lora() | {f"{EMBEDDING}.base_layer.weight": OTHER}, {},
        lambda w: OTHER + embedding_delta(), lambda w: OTHER,
    ),
    "base": ({f"{EMBEDDING}.weight": OTHER}, {}, lambda w: OTHER, lambda w: OTHER),
    "tokens": (ROWS, TOKENS, with_rows, with_rows),
    "tokens of both": (ROWS | HEAD_ROWS, TOKENS, with_rows, with_rows),
    "tokens of the head": (
        HEAD_ROWS, {"trainable_token_indices": {"lm_head": [5, 3, 90]}}, lambda w: w, with_rows,
    ),
}  # fmt: skip


@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize("case", ENDS)
def test_weights_that_are_tied_are_changed_as_they_were_trained(
    case: str, impl: ModelImpl, tmp_path: Path
) -> None:
    """Of which an adapter changes one, or both, each in its way."""
    tensors, fields, of_embedding, of_head = ENDS[case]
    base = tmp_path / "base"
    save_base("llama", base, tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", tensors, **fields)
    tied = weights(base)[f"{EMBEDDING}.weight"]
    changed = {f"{EMBEDDING}.weight": of_embedding(tied), f"{HEAD}.weight": of_head(tied)}
    merged = save_changed(base, tmp_path / "merged", changed, tie_word_embeddings=False)
    assert_merged(generate(load(base, adapter, impl)), merged, base)


@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize("case", ["head", "embedding", "saved head", "saved embedding", "tokens of both"])
def test_weights_that_are_not_tied_are_changed_apart(case: str, impl: ModelImpl, tmp_path: Path) -> None:
    tensors, fields, of_embedding, of_head = ENDS[case]
    base = tmp_path / "base"
    save_base("llama", base, tie_word_embeddings=False)
    adapter = save_adapter(tmp_path / "adapter", tensors, **fields)
    held = weights(base)
    changed = {
        f"{EMBEDDING}.weight": of_embedding(held[f"{EMBEDDING}.weight"]),
        f"{HEAD}.weight": of_head(held[f"{HEAD}.weight"]),
    }
    merged = save_changed(base, tmp_path / "merged", changed)
    assert_merged(generate(load(base, adapter, impl)), merged, base)


@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize("case", ["head", "tokens"])
def test_ranks_have_their_shares_of_tied_weights(case: str, impl: ModelImpl, tmp_path: Path) -> None:
    tensors, fields, of_embedding, of_head = ENDS[case]
    base = tmp_path / "base"
    save_base("llama", base, tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", tensors, **fields)
    tied = weights(base)[f"{EMBEDDING}.weight"]
    changed = {f"{EMBEDDING}.weight": of_embedding(tied), f"{HEAD}.weight": of_head(tied)}
    merged = save_changed(base, tmp_path / "merged", changed, tie_word_embeddings=False)
    for generated in generate_divided(base, read_model(base, impl, adapter=adapter).of_rank(2), 2):
        assert_merged(generated, merged, base)


@pytest.mark.parametrize("prefix", ["language_model.model.layers.", "model.language_model.layers."])
def test_names_of_a_model_for_images_may_be_older_ones(prefix: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_tiny("gemma3", base)
    held = "language_model.model.layers."
    name = f"{held}0.self_attn.q_proj"
    tensors = lora_of(name, *weights(base)[f"{name}.weight"].shape)
    changed = {f"{name}.weight": weights(base)[f"{name}.weight"] + delta_of(tensors, name)}
    renamed = {each.replace(held, prefix): tensor for each, tensor in tensors.items()}
    adapter = save_adapter(tmp_path / "adapter", renamed)
    logits, expected, plain = (
        torch.cat(generate(load(*folders))[1])
        for folders in (
            (base, adapter),
            (save_changed(base, tmp_path / "merged", changed), None),
            (base, None),
        )
    )
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert (logits - plain).abs().max() > 0.1


def test_norms_may_be_saved_whole(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_base("llama", base)
    tensors = {"model.norm.weight": drawn(64), "model.layers.1.input_layernorm.weight": drawn(64)}
    adapter = save_adapter(tmp_path / "adapter", tensors, modules_to_save=["norm", "input_layernorm"])
    assert_merged(generate(load(base, adapter)), save_changed(base, tmp_path / "merged", tensors), base)


@pytest.mark.parametrize("impl", BOTH)
def test_names_may_be_those_of_a_model_without_a_head(impl: ModelImpl, tmp_path: Path) -> None:
    """As of an adapter that was trained for vectors; older files name the adapter in each tensor's."""
    base = tmp_path / "base"
    save_base("llama", base)
    tensors = lora_of(QUERIES, 64, 64)
    named = {
        name.removeprefix("model.").replace(".lora_A.", ".lora_A.default."): each
        for name, each in tensors.items()
    }
    adapter = save_adapter(tmp_path / "adapter", named, task_type="FEATURE_EXTRACTION")
    weight = weights(base)[f"{QUERIES}.weight"]
    changed = {f"{QUERIES}.weight": weight + 8 * delta_of(tensors, QUERIES)}
    merged = save_changed(
        base, tmp_path / "merged", {f"{QUERIES}.weight": weight + delta_of(tensors, QUERIES)}
    )
    assert difference(generate(load(base, adapter, impl)), reference(merged)) < LEAST_AGREEMENT
    other = save_changed(base, tmp_path / "other", changed)
    assert difference(generate(load(base, adapter, impl)), reference(other)) > 100 * LEAST_AGREEMENT
