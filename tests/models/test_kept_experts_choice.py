"""Which experts' weights stay in few bits, what a start says of them, and what counts their bytes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.doctor import _size, describe, on_gpus
from quire.engine.config import EngineConfig
from quire.engine.device.memory_profile import RESERVE_BYTES, refuse_too_large
from quire.engine.models.general import kept_experts
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.kept_weights import Kept
from quire.engine.models.mxfp4_files import MXFP4_FORMAT
from quire.engine.models.reading import read_model
from quire.engine.models.stored_weights import keep_in_folder
from quire.engine.parallel.fit import fits, weight_bytes
from quire.engine.parallel.group import OneOfRanks
from quire.engine.startup import start_engine
from quire.kernels.backend import torch_backend, triton_backend
from quire.kernels.experts.quantised import takes
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.gpu import KNOWN, Gpu
from tests.models import float8_folder, kept_folder, packed_folder
from tests.models.adapter_folder import lora_of, save_adapter
from tests.models.float8_folder import save_quantised
from tests.models.kept_experts_folder import (
    FORMS,
    KEEPING,
    OF_EXPERTS,
    expanded_in,
    experts_in,
    generate,
    joined,
    kept_in,
    load,
    load_ranks,
    save,
)
from tests.models.kept_folder import edit
from tests.models.packed_folder import Form, gptq, save_packed

QWEN = OF_EXPERTS["qwen3_moe"]
WORDS = {  # what a start says of each form: how many weights of experts it keeps, and what else it expands
    "mxfp4": "8 weights of experts are kept in 4 bits, as files have them; activations",
    "blocks of qwen3_moe": (
        "8 weights of experts are kept in 8 bits, as files have them; others are loaded as float32 numbers: "
        "no weights of experts (16); activations"
    ),
    "awq of qwen3_moe": (
        "8 weights of experts are kept in 4 bits, as files have them; others are loaded as float32 numbers: "
        "no weights of experts (16); activations"
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
    "small groups": (of_words(packed_folder.FORMS["awq"]), "no weights of experts (16), groups of 32 (8)"),
    "8 bits": (
        of_words(Form(gptq(bits=8, group_size=128), "gptq", bits=8, group=128, symmetric=True)),
        "no weights of experts (16), 8 bits (8)",
    ),
    "act order": (
        of_words(Form(gptq(group_size=64, desc_act=True), "gptq", group=64, ordered=True)),
        "act order (8)",
    ),
    "powers of two": (
        of_floats(float8_folder.FORMS["compressed powers"]), "scales that are powers of two (8)",
    ),
    "a width of no whole lines": (
        of_floats(kept_folder.FLOATS["rows"], QWEN | {"moe_intermediate_size": 96}),
        "96 inputs, no multiple of 128 (8)",
    ),
    "stacks of matrices": (
        of_floats(kept_folder.FLOATS["rows"], {"hidden_size": 256, "intermediate_size": 128}, "gpt_oss"),
        "stacks of matrices (8)",
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


def same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    return len(ours) == len(theirs) > 0 and all(
        torch.equal(mine, other)
        for some, others in zip(ours, theirs, strict=True)
        for mine, other in zip(some, others, strict=True)
    )


def test_experts_beside_some_that_are_not_quantised_are_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of other layers are kept."""
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    folder = save("rows of qwen3_moe", tmp_path)
    whole = load(folder, torch_backend())[0]
    numbers = expanded_in(whole)[2][0][3].chunk(2)[1].clone()
    edit(folder, lambda tensors: (tensors.pop(f"{name}_scale"), tensors.update({name: numbers})))
    with caplog.at_level(logging.INFO, "quire.engine"):
        model, _ = load(folder)
    assert "6 weights of experts are kept in 8 bits" in caplog.text
    assert "next to weights that are not quantised (2)" in caplog.text
    assert len(experts_in(model)) == 3 and same(expanded_in(model), expanded_in(whole)[2:3])


def test_experts_that_kernels_would_compute_otherwise_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a small stand-in for their module shows, before any weight is read."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    folder = save("mxfp4", tmp_path)
    own = GptOssExperts._apply_gate
    monkeypatch.setattr(GptOssExperts, "_apply_gate", lambda module, both: own(module, both) * 1.1)
    with caplog.at_level(logging.INFO, "quire.engine"):
        model, _ = load(folder)
    assert "no weights are kept in few bits: experts of a kind that kernels do not compute (8)" in caplog.text
    assert not experts_in(model) and len(expanded_in(model)) == 4


def test_layers_that_are_alike_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts of the model are asked for."""
    folder, looked = save("gptq of qwen3_moe", tmp_path), []
    is_computed = kept_experts.is_computed
    monkeypatch.setattr(
        kept_experts, "is_computed", lambda *given: looked.append(given) or is_computed(*given)
    )
    model = read_model(folder, "transformers")
    keep = keep_in_folder(folder, model, torch.bfloat16, takes)
    assert all(len(keep(model.of_rank(ranks)).formats) == 8 for ranks in (1, 2))
    assert len(looked) == 1


def test_a_start_reads_once_what_files_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which weights it keeps it asks no more where it loads them."""
    folder, asked = save("gptq of qwen3_moe", tmp_path), []
    monkeypatch.setattr("quire.engine.rank.torch_backend", lambda: KEEPING)
    stored_experts = kept_experts.stored_experts
    monkeypatch.setattr(
        kept_experts, "stored_experts", lambda *given: asked.append(given) or stored_experts(*given)
    )
    start_engine(
        EngineConfig(
            model=str(folder), model_impl="transformers", device="cpu", dtype="bfloat16", max_model_len=64,
            num_gpu_blocks_override=20, preemption_mode="recompute",
        )
    )  # fmt: skip
    assert len(asked) == 1


def test_a_stand_in_shows_rows_that_are_in_another_order(tmp_path: Path) -> None:
    folder = save("mxfp4", tmp_path)
    keep = keep_in_folder(folder, read_model(folder), torch.bfloat16, takes)
    model = keep.keywords["model"]  # type: ignore[attr-defined]
    module = model.model.layers[0].mlp.experts
    forms = [*keep(read_model(folder)).formats.values()][:2]
    assert kept_experts.is_computed(module, forms)
    module._apply_gate = lambda both: both.chunk(2, dim=-1)[0]
    assert not kept_experts.is_computed(module, forms)


def test_what_kernels_do_not_compute_after_all_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("mxfp4", tmp_path)
    monkeypatch.setattr("quire.engine.models.general.expert_weights.are_computed", lambda *given: False)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts: .*give --quantized-weights expand"):
        load(folder)


def test_what_the_models_own_code_rounds_in_bf16_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compared with what it computes in fp32."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    own = GptOssExperts._apply_gate

    def rounded(module: Any, both: Tensor) -> Tensor:
        return own(module, both) * (1.02 if both.dtype == torch.bfloat16 else 1.0)

    monkeypatch.setattr(GptOssExperts, "_apply_gate", rounded)
    assert len(experts_in(load(save("mxfp4", tmp_path), dtype=torch.bfloat16)[0])) == 4


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
    assert len(expanded_in(load(folder, quantized_weights="expand")[0])) == 4


@pytest.mark.parametrize("name", ["mlp.experts.2.up_proj.weight", "mlp.experts.1.down_proj.weight"])
def test_what_is_missing_is_told_by_name(name: str, tmp_path: Path) -> None:
    folder = save("rows of qwen3_moe", tmp_path)
    name = f"model.layers.1.{name}"
    edit(folder, lambda tensors: (tensors.pop(f"{name}_scale"), tensors.pop(name)))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\..*"):
        load(folder)


@pytest.mark.parametrize("form", ["mxfp4", "blocks of qwen3_moe", "gptq of qwen3_moe"])
@pytest.mark.parametrize(("ranks", "whole_ones"), [(1, False), (2, False), (2, True)])
def test_what_fits_counts_the_bits_that_are_kept(
    form: str, ranks: int, whole_ones: bool, tmp_path: Path
) -> None:
    """By files, and by config.json where they are not here."""
    folder = save(form, tmp_path)
    model = read_model(folder, "transformers")
    part = model.of_rank(ranks, expert_parallel=whole_ones)
    alone = None if ranks == 1 else OneOfRanks(0, ranks)
    loaded, num_bytes = load(folder, dtype=torch.bfloat16, config=part, ranks=alone)
    assert len(experts_in(loaded)) == 4

    def counted() -> int:
        keep = keep_in_folder(folder, model, torch.bfloat16, KEEPING.keeps_experts)
        return weight_bytes(folder, part, 2, keep)

    assert counted() == num_bytes < weight_bytes(folder, part, 2)
    (folder / "model.safetensors").unlink()
    assert counted() == pytest.approx(num_bytes, rel=0.02)  # scales may have another dtype


def test_a_width_that_ranks_divide_otherwise_is_kept_in_whole_experts(tmp_path: Path) -> None:
    """Of four each has 48 inputs, of which 32 have a scale."""
    folder = save("mxfp4", tmp_path)
    model = read_model(folder)
    keep = keep_in_folder(folder, model, torch.bfloat16, takes)
    assert len(keep(model.of_rank(2, expert_parallel=True)).formats) == 8
    assert set(keep(model.of_rank(4)).reasons.values()) == {
        "48 inputs, no multiple of 32 (kept with --enable-expert-parallel)"
    }


def kept_of(folder: Path, supports: Any = takes, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Kept:
    model = given.pop("config", None) or read_model(folder, "transformers")
    return keep_in_folder(folder, model, dtype, supports, **given)(model)


def test_what_is_kept_is_told_by_config_json_where_files_are_not_here(tmp_path: Path) -> None:
    folder = save("mxfp4", tmp_path)
    here = kept_of(folder)
    assert len(here.formats) == 8 and not here.reasons
    (folder / "model.safetensors").unlink()
    assert kept_of(folder) == here
    assert set(kept_of(folder, dtype=torch.float16).reasons.values()) == {
        "no kernels here multiply float16 numbers by them"
    }


def test_none_are_kept_on_a_cpu_or_where_all_are_to_be_expanded(tmp_path: Path) -> None:
    folder = save("gptq of qwen3_moe", tmp_path)
    for kept, why in (
        (kept_of(folder, torch_backend().keeps_experts), "no kernels here multiply bfloat16 numbers by them"),
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
        ("gptq of qwen3_moe", "mlp.experts.1.down_proj", 256, 3),
        ("gptq of qwen3_moe", "mlp.experts.2.up_proj", 256, 3),
        ("gptq of qwen3_moe", "self_attn.o_proj", 256, 4),
        ("mxfp4", "self_attn.o_proj", 64, 4),
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
    assert len(experts_in(ours)) == kept and len(expanded_in(ours)) == 4 - kept
    (tokens, logits), (expected, theirs) = generate(ours), generate(other)
    assert tokens == expected
    for each, wanted in zip(logits, theirs, strict=True):
        torch.testing.assert_close(each, wanted, atol=1e-4, rtol=1e-4)
    here = kept_of(folder, config=adapted)
    assert list(here.reasons.values()).count("an adapter is merged into them") == 2 * (4 - kept)
    (folder / "model.safetensors").unlink()
    assert kept_of(folder, config=adapted).formats.keys() == here.formats.keys()


def test_a_start_and_the_doctor_count_the_bits_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("mxfp4", tmp_path)
    monkeypatch.setattr("quire.engine.rank.torch_backend", lambda: KEEPING)

    def started(**asked: Any) -> tuple[Any, dict[str, str]]:
        config = EngineConfig(
            model=str(folder), device="cpu", dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=20,
            preemption_mode="recompute", **asked,
        )  # fmt: skip
        info = start_engine(config)[1]
        return info, dict(describe(info)) | dict(on_gpus(folder, read_model(folder), info, config, 8 << 30))

    info, told = started()
    num_bytes = load(folder, dtype=torch.bfloat16)[1]
    assert (info.weight_bytes, info.kept_bits) == (num_bytes, (4,))
    assert told["weights"] == f"{_size(num_bytes)} in bfloat16, and those of experts in 4 bits"
    assert told["on 1 GPU"].startswith(f"weights {_size(num_bytes)} each")
    info, told = started(quantized_weights="expand")
    num_bytes = load(folder, torch_backend(), dtype=torch.bfloat16)[1]
    assert (info.weight_bytes, info.kept_bits) == (num_bytes, ())
    assert told["weights"] == f"{_size(num_bytes)} in bfloat16"
    assert told["on 1 GPU"].startswith(f"weights {_size(num_bytes)} each")


def test_a_start_has_room_for_what_is_kept_or_says_that_weights_need_not_be_expanded(tmp_path: Path) -> None:
    folder = save("mxfp4", tmp_path)
    model = read_model(folder)
    keep = keep_in_folder(folder, model, torch.bfloat16, takes)
    room = weight_bytes(folder, model, 2, keep) + 1 + RESERVE_BYTES

    def start(**asked: Any) -> None:
        config = EngineConfig(model=str(folder), gpu_memory_utilization=1.0, **asked)
        own = keep_in_folder(folder, model, torch.bfloat16, takes, **asked)
        refuse_too_large(config, folder, model, 2, UNSCALED[torch.bfloat16], room, own)

    start()
    with pytest.raises(ValueError, match=", leave out --quantized-weights expand, or raise"):
        start(quantized_weights="expand")


def test_a_start_and_the_doctor_know_that_whole_experts_take_less(tmp_path: Path) -> None:
    """By columns four ranks expand them: the 48 inputs of each are no multiple of 32."""
    folder = save("mxfp4", tmp_path)
    model, held = read_model(folder), UNSCALED[torch.bfloat16]
    keep = keep_in_folder(folder, model, torch.bfloat16, takes)
    taken = weight_bytes(folder, model.of_rank(4, expert_parallel=True), 2, keep)

    def start(**asked: Any) -> None:
        config = EngineConfig(model=str(folder), gpu_memory_utilization=1.0, tensor_parallel_size=4, **asked)
        refuse_too_large(config, folder, model, 2, held, taken + 1 + RESERVE_BYTES, keep)

    start(enable_expert_parallel=True)
    with pytest.raises(ValueError, match=", have experts whole by --enable-expert-parallel, or raise"):
        start()
    found = fits(folder, model, 2, held, 1 << 30, keep, expert_parallel=True)
    assert [fit.weight_bytes for fit in found if fit.ranks == 4] == [taken]


@pytest.mark.parametrize("form", FORMS)
def test_dummy_weights_of_experts_are_drawn_as_they_are_kept(form: str, tmp_path: Path) -> None:
    folder = save(form, tmp_path)
    given: dict[str, Any] = {"load_format": "dummy", "dtype": torch.bfloat16}
    (model, num_bytes), (again, _), (other, _) = (load(folder, seed=seed, **given) for seed in (3, 3, 4))
    read, expected = load(folder, dtype=torch.bfloat16)
    assert len(experts_in(model)) == len(experts_in(read))
    assert num_bytes == pytest.approx(expected, rel=0.02)  # scales may have another dtype
    assert same(kept_in(model), kept_in(again)) and not same(kept_in(model), kept_in(other))
    for gate_up, down, *_ in kept_in(model):
        assert float(gate_up.std()) == pytest.approx(0.02, rel=0.1)
        assert float(down.std()) == pytest.approx(0.02, rel=0.1)
    for mine, theirs in zip(model._decoder.parameters(), again._decoder.parameters(), strict=True):
        assert torch.equal(mine, theirs) and mine.isfinite().all()
    if form == "mxfp4":
        assert generate(load(folder, load_format="dummy")[0])[0]


@pytest.mark.parametrize("whole_ones", [False, True], ids=["by columns", "whole experts"])
@pytest.mark.parametrize("form", ["mxfp4", "blocks of qwen3_moe"])
def test_ranks_draw_what_one_alone_does(form: str, whole_ones: bool, tmp_path: Path) -> None:
    folder = save(form, tmp_path)
    whole: GeneralModel = load(folder, load_format="dummy")[0]
    ranks = load_ranks(folder, 2, whole_ones=whole_ones, load_format="dummy")
    parts = joined(ranks, whole_ones=whole_ones)
    assert same(parts, [each[:2] for each in kept_in(whole)])
