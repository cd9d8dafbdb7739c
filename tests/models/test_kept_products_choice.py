"""Which linear layers' weights stay in few bits, what a start says of them, and what is counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.models.general.kept_linear import KeptLinear
from quire.engine.models.kept_weights import Kept
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.parallel.fit import weight_bytes
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.backend import torch_backend, triton_backend
from tests.models import float8_folder, kept_folder, packed_folder
from tests.models.adapter_folder import lora_of, save_adapter
from tests.models.kept_folder import generate, generate_on_ranks
from tests.models.kept_products_folder import (
    EXPANDING,
    KEEPING,
    KINDS,
    MOST_APART,
    kept_in,
    layers_in,
    load,
    save,
)
from tests.models.packed_folder import Form, gptq, save_packed
from tests.models.started_counts import assert_counted


def kept_of(folder: Path, backend: Any = None, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Kept:
    model = given.pop("config", None) or read_model(folder, "transformers")
    return keep_in_folder(folder, model, dtype, backend or triton_backend(), **given)(model)


def test_a_start_says_what_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save("qwen3_next", "blocks", tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        load(folder)
    assert "12 weights of layers are kept in 8 bits, as files have them; others are loaded as float32 " in (
        caplog.text
    )
    for why in (
        "no kernels here multiply float32 numbers by them (4)",  # experts
        "8 outputs, no multiple of 16 (1)",
    ):
        assert why in caplog.text


EXPANDED: dict[str, tuple[Form, str]] = {
    "small groups": (packed_folder.FORMS["awq"], "groups of 32"),
    "8 bits": (
        Form(gptq(bits=8, group_size=128), "gptq", bits=8, group=128, symmetric=True), "8 bits",
    ),
    "act order": (Form(gptq(group_size=64, desc_act=True), "gptq", group=64, ordered=True), "act order"),
}  # fmt: skip


@pytest.mark.parametrize("what", EXPANDED)
def test_others_are_expanded_and_a_start_says_why(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form, why = EXPANDED[what]
    folder = save_packed("gemma3_text", form, tmp_path, KINDS["gemma3_text"])[0]
    with caplog.at_level(logging.INFO, "quire.engine"):
        model, num_bytes = load(folder)
    assert f"no weights are kept in few bits: {why} (14)" in caplog.text
    assert num_bytes == load(folder, EXPANDING)[1] and not kept_in(model)


def test_none_are_kept_on_a_cpu_or_where_all_are_to_be_expanded(tmp_path: Path) -> None:
    folder = save("gemma3_text", "gptq", tmp_path)
    assert len(kept_of(folder).formats) == 14
    for kept, why in (
        (kept_of(folder, torch_backend()), "no kernels here multiply bfloat16 numbers by them"),
        (kept_of(folder, dtype=torch.float32), "no kernels here multiply float32 numbers by them"),
        (kept_of(folder, quantized_weights="expand"), "--quantized-weights is expand"),
    ):
        assert not kept.formats and set(kept.reasons.values()) == {why}


def test_heads_and_what_latents_are_expanded_by_are_not_kept(tmp_path: Path) -> None:
    """The one stands in no layer, the other is read by more than a product."""
    sizes = {"hidden_size": 256, "kv_lora_rank": 128, "q_lora_rank": 128, "intermediate_size": 256}
    sizes["num_hidden_layers"] = 2
    form = packed_folder.Form(gptq(group_size=128), "gptq", group=128, symmetric=True)
    folder = save_packed("deepseek_v3", form, tmp_path, sizes)[0]
    kept = kept_of(folder)
    latents = {name: why for name, why in kept.reasons.items() if name.endswith("kv_b_proj.weight")}
    assert set(latents.values()) == {"what latents are expanded by"} and len(latents) == 2
    assert {name.split(".")[-2] for name in kept.formats} >= {"q_a_proj", "q_b_proj", "down_proj"}
    model, _ = load(folder)
    other, _ = load(folder, EXPANDING)
    assert generate(model)[0] == generate(other)[0]


def test_weights_that_layers_share_are_expanded(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    folder = float8_folder.save_quantised("zamba2", kept_folder.FLOATS["rows"], tmp_path, sizes)[0]
    (ours, _), (other, _) = load(folder), load(folder, EXPANDING)
    kept = kept_of(folder)
    assert ours.kept and "weights that layers share" in kept.reasons.values()
    assert not [name for name in ours.kept if ".shared_transformer." in name]
    assert generate(ours)[0] == generate(other)[0]


def test_what_an_adapter_changes_is_expanded(tmp_path: Path) -> None:
    """And what is multiplied together with it; also as far as config.json tells."""
    folder = save("gemma3_text", "gptq", tmp_path)
    lora = lora_of("model.layers.1.self_attn.v_proj", 128, 256)
    adapted = read_model(folder, adapter=save_adapter(tmp_path / "adapter", lora, folder))
    (ours, _), (other, _) = (load(folder, backend, config=adapted) for backend in (KEEPING, EXPANDING))
    dense = [name for name, layer in layers_in(ours).items() if not isinstance(layer, KeptLinear)]
    assert dense == [f"layers.1.self_attn.{part}_proj" for part in "qkv"]
    assert generate(ours)[0] == generate(other)[0]
    here = kept_of(folder, config=adapted)
    assert set(here.reasons.values()) == {"an adapter is merged into them"}
    (folder / "model.safetensors").unlink()
    assert kept_of(folder, config=adapted).formats.keys() == here.formats.keys()


RANKED = [("gemma3_text", "awq"), ("phi3", "rows"), ("starcoder2", "gptq"), ("qwen3_5_text", "blocks")]


@pytest.mark.parametrize(("kind", "form"), RANKED)
def test_ranks_compute_by_their_shares_what_one_alone_does(kind: str, form: str, tmp_path: Path) -> None:
    folder = save(kind, form, tmp_path)
    whole, _ = load(folder)
    part = whole.config.of_rank(2)
    ranks, generated = generate_on_ranks(folder, part, 2, KEEPING)
    assert all(len(rank.kept) == len(whole.kept) for rank in ranks) == (kind != "qwen3_5_text")
    expected, logits = generate(whole)
    for tokens, theirs in generated:
        assert tokens == expected
        for each, wanted in zip(theirs, logits, strict=True):
            torch.testing.assert_close(each, wanted, atol=MOST_APART, rtol=1e-3)


def test_shares_that_are_no_multiple_of_a_group_are_expanded(tmp_path: Path) -> None:
    folder = save("gemma3_text", "awq", tmp_path)
    part = read_model(folder, "transformers").of_rank(4)
    kept = keep_in_folder(folder, read_model(folder, "transformers"), torch.bfloat16, KEEPING)(part)
    assert set(kept.reasons.values()) == {"64 inputs, no multiple of 128"}
    assert {name.split(".")[-2] for name in kept.reasons} == {"o_proj"}
    assert len(kept.formats) == 12


@pytest.mark.parametrize(("kind", "form"), [("gemma3_text", "gptq"), ("starcoder2", "blocks")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_fits_counts_the_bits_that_are_kept(kind: str, form: str, ranks: int, tmp_path: Path) -> None:
    """By files, and by config.json where they are not here."""
    folder = save(kind, form, tmp_path)
    model = read_model(folder, "transformers")
    part, alone = model.of_rank(ranks), None if ranks == 1 else OneOfRanks(0, ranks)
    loaded, num_bytes = load(folder, dtype=torch.bfloat16, config=part, ranks=alone)
    assert loaded.kept

    def counted() -> int:
        keep = keep_in_folder(folder, model, torch.bfloat16, KEEPING)
        return weight_bytes(folder, part, 2, keep)

    assert counted() == num_bytes < weight_bytes(folder, part, 2)
    (folder / "model.safetensors").unlink()
    assert counted() == pytest.approx(num_bytes, rel=0.02)  # scales may have another dtype


def test_a_start_and_the_doctor_count_the_bits_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("gemma3_text", "blocks", tmp_path)
    kept = load(folder, dtype=torch.bfloat16)[1], "layers' products in 8 bits"
    expanded = load(folder, EXPANDING, dtype=torch.bfloat16)[1]
    assert_counted(folder, KEEPING, kept, expanded, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "form"), [("gemma3_text", "words"), ("starcoder2", "awq"), ("qwen3_5_text", "blocks")]
)
def test_dummy_weights_are_drawn_as_they_are_kept(kind: str, form: str, tmp_path: Path) -> None:
    folder = save(kind, form, tmp_path)
    given: dict[str, Any] = {"load_format": "dummy"}
    (model, num_bytes), (again, _), (other, _) = (load(folder, seed=seed, **given) for seed in (3, 3, 4))
    read, expected = load(folder)
    assert num_bytes == pytest.approx(expected, rel=0.05)  # scales may have another dtype
    assert model.kept.keys() == read.kept.keys()

    def numbers(of: Any) -> list[Tensor]:
        return [each for each in kept_in(of).values() if each.numel()]

    for mine, same, others in zip(numbers(model), numbers(again), numbers(other), strict=True):
        assert torch.equal(mine, same) and not torch.equal(mine, others)
        assert float(mine.std()) == pytest.approx(0.02, rel=0.1)
    assert all(weight.isfinite().all() for weight in model._decoder.parameters())
    biases = [layer.bias for layer in layers_in(model).values() if layer.bias is not None]
    assert all(not bias.any() for bias in biases) and bool(biases) == (kind == "starcoder2")
    assert generate(model)[0] == generate(again)[0]
    part = read_model(folder, "transformers").of_rank(2)
    ranks = [load(folder, config=part, ranks=OneOfRanks(rank, 2), **given, seed=3)[0] for rank in (0, 1)]
    for name, whole in kept_in(model).items():
        if name.endswith(("o_proj", "down_proj", "c_proj")) and name in kept_in(ranks[0]):
            assert torch.equal(torch.cat([kept_in(rank)[name] for rank in ranks], 1), whole)
