"""The loader takes exactly the weights that the config asks for, and says by name what is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.models.loader import Model, load_model
from quire.engine.models.native_config import read_native
from quire.kernels.backend import torch_backend
from tests.models.paged_driver import PagedDriver

Edit = Callable[[dict[str, Tensor]], object]


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> tuple[Model, int]:
    config = read_native(folder)
    arguments = {"device": "cpu", "max_model_len": 64} | options
    return load_model(folder, config, torch_backend(), dtype=dtype, **arguments)


def logits(folder: Path, model: Model) -> Tensor:
    driver = PagedDriver(model, read_native(folder), rows=1, max_len=64)
    return driver.step({}, {0: [5, 4, 3, 2, 1]})[0]


@pytest.fixture
def edited(model_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Edit], Path]:
    """A copy of a tiny model's folder with its tensors edited."""

    def edit_copy(name: str, edit: Edit) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(model_folder(name), folder)
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return edit_copy


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "model.layers.1.mlp.up_proj.weight is missing",
        ),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is no weight of Qwen3ForCausalLM"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}),
            "model.layers.2.mlp.up_proj.weight is no weight",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(384, 64)}),
            "model.layers.0.self_attn.k_proj.weight has shape [384, 64], but config.json asks for [192, 64]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "model.norm.weight holds I8",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}),
            "ties lm_head.weight to model.embed_tokens.weight, but the two differ",
        ),
        (lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}), "is there twice"),
    ],
)
def test_wrong_weights_are_refused_by_name(
    edit: Edit, named: str, edited: Callable[[str, Edit], Path]
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        load(edited("qwen3", edit))


def test_an_untied_model_needs_its_head(edited: Callable[[str, Edit], Path]) -> None:
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        load(edited("qwen3-bias", lambda t: t.pop("lm_head.weight")))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("qwen3", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})),
        ("qwen3", lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")})),
        (
            "llama-tied-linear",
            lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}),
        ),
        (
            "gpt2",
            lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, dtype=torch.uint8)}),
        ),
        (
            "gpt2",  # as OpenAI's checkpoints name them
            lambda t: (
                [t.update({key.removeprefix("transformer."): t.pop(key)}) for key in list(t)]
                + [t.update({"h.1.attn.masked_bias": torch.ones(1)})]
            ),
        ),
        (
            "llama-tied-linear",
            lambda t: [t.update({key.removeprefix("model."): t.pop(key)}) for key in list(t)],
        ),
    ],
)
def test_harmless_differences_change_nothing(
    name: str, edit: Edit, edited: Callable[[str, Edit], Path], model_folder: Callable[[str], Path]
) -> None:
    original, changed = model_folder(name), edited(name, edit)
    expected = logits(original, load(original)[0])
    assert torch.equal(logits(changed, load(changed)[0]), expected)


def test_progress_and_size_are_bytes_in_the_dtype_asked_for(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama3-sharded")
    assert len(list(folder.glob("*.safetensors"))) > 2
    elements = sum(
        tensor.numel() for path in folder.glob("*.safetensors") for tensor in load_file(path).values()
    )
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        seen: list[tuple[int, int]] = []
        model, weight_bytes = load(folder, dtype, on_progress=lambda *step, seen=seen: seen.append(step))
        assert weight_bytes == elements * size
        assert model.embedding.dtype == dtype
        assert seen[0] == (0, weight_bytes)
        assert seen[-1] == (weight_bytes, weight_bytes)
        assert len(seen) > 10
        assert seen == sorted(seen)


def test_folders_without_safetensors_say_what_to_do(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = model_folder("qwen3") / "config.json"
    shutil.copy(config, tmp_path)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"it has pytorch_model\.bin.*save_pretrained"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "'../model.safetensors'; it may only name"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "'/etc/x.safetensors'"),
        ({"weight_map": {"a": "..\\x.safetensors"}}, "beside it"),
        ({"weight_map": {"a": "weights.bin"}}, "'weights.bin'"),
        ({"weight_map": {"a": 3}}, "names 3"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors, which is not in"),
        ({"weights": {}}, "is not an index"),
        ([], "is not an index"),
    ],
)
def test_an_index_may_only_name_files_beside_it(
    index: object, named: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    shutil.copy(model_folder("qwen3") / "model.safetensors", tmp_path)
    shutil.copy(model_folder("qwen3") / "config.json", folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=re.escape(named)):
        load(folder)


@pytest.mark.parametrize("name", ["qwen3", "opt", "gpt2", "opt-no-bias"])
def test_dummy_weights_follow_the_seed_and_need_no_files(
    name: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(model_folder(name) / "config.json", tmp_path)
    first, again, other = (
        logits(tmp_path, load(tmp_path, load_format="dummy", seed=seed)[0]) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    model, weight_bytes = load(tmp_path, load_format="dummy")
    assert weight_bytes == load(model_folder(name))[1]
    assert model.embedding.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_context_beyond_the_model_s_positions_is_refused(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"--max-model-len \(129\).*\(128\)"):
        load(model_folder("opt"), max_model_len=129)
