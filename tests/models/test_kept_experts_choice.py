"""Which experts' weights stay in few bits, and what a start says of them."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.config import EngineConfig
from quire.engine.models.kept_weights import Kept
from quire.engine.models.mxfp4_files import MXFP4_FORMAT
from quire.engine.models.packed_files import PackedTensor
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.startup import start_engine
from quire.kernels.backend import torch_backend, triton_backend
from quire.kernels.gpu import KNOWN, Gpu
from tests.models import float8_folder, kept_folder, packed_folder
from tests.models.adapter_folder import lora_of, save_adapter
from tests.models.float8_folder import save_quantised
from tests.models.kept_experts_folder import (
    KEEPING,
    OF_EXPERTS,
    TAKING,
    expanded_in,
    experts_in,
    load,
    same,
    save,
)
from tests.models.kept_folder import edit, generate
from tests.models.packed_folder import Form, gptq, save_packed

QWEN = OF_EXPERTS["qwen3_moe"]
STACKED = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2}
WORDS = {  # what a start says of each form: how many weights of experts it keeps, and what else it expands
    "mxfp4": "4 weights of experts are kept in 4 bits, as files have them; activations",
    "blocks of qwen3_moe": (
        "4 weights of experts are kept in 8 bits, as files have them; others are loaded as float32 numbers: "
        "no kernels here multiply float32 numbers by them (8); activations"
    ),
    "awq of qwen3_moe": (
        "4 weights of experts are kept in 4 bits, as files have them; others are loaded as float32 numbers: "
        "no kernels here multiply float32 numbers by them (8); activations"
    ),
}


@pytest.mark.parametrize("form", WORDS)
def test_a_start_says_what_is_kept(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(form, tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        load(folder)
    assert WORDS[form] in caplog.text


def of_words(form: Form, sizes: dict[str, Any] = QWEN) -> Any:
    return lambda folder: save_packed("qwen3_moe", form, folder, sizes)[0]


def of_floats(form: float8_folder.Form, sizes: dict[str, Any] = QWEN, kind: str = "qwen3_moe") -> Any:
    return lambda folder: save_quantised(kind, form, folder, sizes)[0]


EXPANDED: dict[str, tuple[Any, str]] = {
    "small groups": (of_words(packed_folder.FORMS["awq"]), "groups of 32 (12)"),
    "8 bits": (
        of_words(Form(gptq(bits=8, group_size=128), "gptq", bits=8, group=128, symmetric=True)),
        "8 bits (12)",
    ),
    "act order": (
        of_words(Form(gptq(group_size=64, desc_act=True), "gptq", group=64, ordered=True)),
        "act order (12)",
    ),
    "powers of two": (
        of_floats(float8_folder.FORMS["compressed powers"]), "scales that are powers of two (12)",
    ),
    "a width of no whole lines": (
        of_floats(kept_folder.FLOATS["rows"], QWEN | {"moe_intermediate_size": 96}),
        "96 inputs, no multiple of 128 (4)",
    ),
    "stacks of matrices": (
        of_floats(kept_folder.FLOATS["rows"], STACKED, "gpt_oss"),
        "stacks of matrices (4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EXPANDED)
def test_others_are_expanded_and_a_start_says_why(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_form, why = EXPANDED[what]
    folder = save_form(tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine"):
        ours, num_bytes = load(folder)
    assert "no weights are kept in few bits: " in caplog.text and why in caplog.text
    other, expected = load(folder, torch_backend())
    assert num_bytes == expected
    assert same(expanded_in(ours), expanded_in(other))


def test_experts_beside_some_that_are_not_quantised_are_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of other layers are kept."""
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    folder = save("rows of qwen3_moe", tmp_path)
    whole = load(folder, torch_backend())[0]
    numbers = expanded_in(whole)[1][0][3].chunk(2)[1].clone()
    edit(folder, lambda tensors: (tensors.pop(f"{name}_scale"), tensors.update({name: numbers})))
    with caplog.at_level(logging.INFO, "quire.engine"):
        model, _ = load(folder)
    assert "2 weights of experts are kept in 8 bits" in caplog.text
    assert "next to weights that are not quantised (2)" in caplog.text
    assert len(experts_in(model)) == 1 and same(expanded_in(model), expanded_in(whole)[1:])


def test_a_start_reads_once_what_files_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which weights it keeps it asks no more where it loads them: of GPTQ's, which groups inputs are in."""
    folder, asked = save("gptq of qwen3_moe", tmp_path), Counter[str]()
    monkeypatch.setattr("quire.engine.rank.torch_backend", lambda: KEEPING)
    told = PackedTensor.kept_format.fget  # type: ignore[attr-defined]

    def counted(tensor: PackedTensor) -> Any:
        asked[tensor.name] += 1
        return told(tensor)

    monkeypatch.setattr(PackedTensor, "kept_format", property(counted))
    start_engine(
        EngineConfig(
            model=str(folder), model_impl="transformers", device="cpu", dtype="bfloat16", max_model_len=64,
            num_gpu_blocks_override=20, preemption_mode="recompute",
        )
    )  # fmt: skip
    assert len(asked) >= 12 and set(asked.values()) == {1}


def test_scales_that_kernels_do_not_multiply_by_are_refused_by_name(tmp_path: Path) -> None:
    folder = save("mxfp4", tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"

    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}_scales"][2, 5, 1] = 131

    edit(folder, enlarge)
    with pytest.raises(
        ValueError, match=rf"{name}\[2\] has a scale of 2\^4; .*give --quantized-weights expand"
    ):
        load(folder)
    assert len(expanded_in(load(folder, quantized_weights="expand")[0])) == 2


@pytest.mark.parametrize("name", ["mlp.experts.2.up_proj.weight", "mlp.experts.1.down_proj.weight"])
def test_what_is_missing_is_told_by_name(name: str, tmp_path: Path) -> None:
    folder = save("rows of qwen3_moe", tmp_path)
    name = f"model.layers.1.{name}"
    edit(folder, lambda tensors: (tensors.pop(f"{name}_scale"), tensors.pop(name)))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\..*"):
        load(folder)


def test_a_width_that_ranks_divide_otherwise_is_kept_in_whole_experts(tmp_path: Path) -> None:
    """Of four each has 48 inputs, of which 32 have a scale."""
    folder = save("mxfp4", tmp_path)
    model = read_model(folder)
    keep = keep_in_folder(folder, model, torch.bfloat16, TAKING)
    assert len(keep(model.of_rank(2, expert_parallel=True)).formats) == 4
    assert set(keep(model.of_rank(4)).reasons.values()) == {
        "48 inputs, no multiple of 32 (kept with --enable-expert-parallel)"
    }


def kept_of(folder: Path, backend: Any = TAKING, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Kept:
    model = given.pop("config", None) or read_model(folder, "transformers")
    return keep_in_folder(folder, model, dtype, backend, **given)(model)


def test_what_is_kept_is_told_by_config_json_where_files_are_not_here(tmp_path: Path) -> None:
    folder = save("mxfp4", tmp_path)
    here = kept_of(folder)
    assert len(here.formats) == 4 and not here.reasons
    (folder / "model.safetensors").unlink()
    assert kept_of(folder) == here
    assert set(kept_of(folder, dtype=torch.float16).reasons.values()) == {
        "no kernels here multiply float16 numbers by them"
    }


def test_none_are_kept_on_a_cpu_or_where_all_are_to_be_expanded(tmp_path: Path) -> None:
    folder = save("gptq of qwen3_moe", tmp_path)
    for kept, why in (
        (kept_of(folder, torch_backend()), "no kernels here multiply bfloat16 numbers by them"),
        (kept_of(folder, dtype=torch.float32), "no kernels here multiply float32 numbers by them"),
        (kept_of(folder, quantized_weights="expand"), "--quantized-weights is expand"),
    ):
        assert not kept.formats and why in kept.reasons.values()


def test_none_are_kept_on_a_gpu_that_kernels_do_not_run_on() -> None:
    """There each step would expand all of them."""
    older = Gpu("T4", (7, 5), 65536, 40)
    assert not triton_backend(older).keeps_experts(MXFP4_FORMAT, torch.bfloat16)
    assert all(triton_backend(gpu).keeps_experts(MXFP4_FORMAT, torch.bfloat16) for gpu in KNOWN.values())


@pytest.mark.parametrize(
    ("form", "module", "size", "kept"),
    [
        ("gptq of qwen3_moe", "mlp.experts.1.down_proj", 256, 1),
        ("gptq of qwen3_moe", "mlp.experts.2.up_proj", 256, 1),
        ("gptq of qwen3_moe", "self_attn.o_proj", 256, 2),
        ("mxfp4", "self_attn.o_proj", 64, 2),
    ],
)
def test_experts_that_an_adapter_changes_are_expanded(
    form: str, module: str, size: int, kept: int, tmp_path: Path
) -> None:
    """Those of other layers are kept, also as far as config.json tells."""
    folder = save(form, tmp_path)
    lora = lora_of(f"model.layers.1.{module}", size, size)
    adapted = read_model(folder, adapter=save_adapter(tmp_path / "adapter", lora, folder))
    (ours, _), (other, _) = (load(folder, backend, config=adapted) for backend in (KEEPING, torch_backend()))
    assert len(experts_in(ours)) == kept and len(expanded_in(ours)) == 2 - kept
    (tokens, logits), (expected, theirs) = generate(ours), generate(other)
    assert tokens == expected
    for each, wanted in zip(logits, theirs, strict=True):
        torch.testing.assert_close(each, wanted, atol=1e-4, rtol=1e-4)
    here = kept_of(folder, config=adapted)
    changed = [name for name, why in here.reasons.items() if why == "an adapter is merged into them"]
    assert sum(".experts." in name for name in changed) == 2 * (2 - kept)
    (folder / "model.safetensors").unlink()
    assert kept_of(folder, config=adapted).formats.keys() == here.formats.keys()
