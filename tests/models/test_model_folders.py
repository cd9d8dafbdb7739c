"""Which folders a model is made of: its own, and that of an adapter; here, or on the Hub."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from quire.engine.models.hub import FILES, TOKENIZER_FILES
from quire.engine.models.model_folders import (
    ADAPTER_FILES,
    ModelFolders,
    check_names,
    local_folders,
    merged_names,
    resolve_folders,
)
from quire.service.demo import MODEL_FOLDER
from tests.models.adapter_folder import lora_of, save_adapter

WHOLE = lora_of("model.layers.0.self_attn.q_proj", 8, 8)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder that looks like a model's."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("resolve", [local_folders, resolve_folders])
def test_a_folder_of_an_adapter_names_its_model(resolve: Any, base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", WHOLE, base)
    assert resolve(str(adapter), None) == resolve(str(base), str(adapter)) == ModelFolders(base, adapter)
    assert resolve(str(base), None) == ModelFolders(base)


def test_a_folder_that_has_both_is_a_model(base: Path, tmp_path: Path) -> None:
    """As transformers has it; its adapter is one that may be asked for."""
    save_adapter(base, WHOLE, "owner/elsewhere")
    assert resolve_folders(str(base), None) == ModelFolders(base)
    assert resolve_folders(str(base), str(base)) == ModelFolders(base, base)


def test_names_are_those_that_were_given(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", WHOLE, "owner/base")
    folders = ModelFolders(base, adapter)
    assert merged_names("mine", None, folders) == ("mine", "owner/base")
    assert merged_names("other/base", "mine", folders) == ("mine", "other/base")
    assert merged_names("mine", None, ModelFolders(base)) is None


def test_the_tokenizer_is_the_adapters_if_it_has_one(base: Path, tmp_path: Path) -> None:
    folders = ModelFolders(base, save_adapter(tmp_path / "adapter", WHOLE, base))
    assert (ModelFolders(base).tokenizer, ModelFolders(base).template) == (base, None)
    assert (folders.tokenizer, folders.template) == (base, None)
    template = tmp_path / "adapter" / "chat_template.jinja"
    template.touch()
    assert (folders.tokenizer, folders.template) == (base, str(template))
    (tmp_path / "adapter" / "tokenizer.json").touch()
    assert (folders.tokenizer, folders.template) == (tmp_path / "adapter", None)


@pytest.fixture
def asked(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, list[str]]]:
    """Put a model and two adapters on the Hub; return what is asked of it."""
    save_adapter(tmp_path / "adapter", WHOLE, "owner/base")
    save_adapter(tmp_path / "fixed", WHOLE, "owner/base", revision="v1.5")
    seen: list[tuple[str, Any, list[str]]] = []

    def download(repo: str, *, revision: Any, allow_patterns: list[str], **others: Any) -> str:
        seen.append((repo, revision, allow_patterns))
        return str(tmp_path / repo.removeprefix("owner/"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return seen


def test_both_are_downloaded(asked: list[Any], base: Path, tmp_path: Path) -> None:
    assert resolve_folders("owner/adapter", None) == ModelFolders(base, tmp_path / "adapter")
    adapter, model = ("owner/adapter", None, ADAPTER_FILES), ("owner/base", None, FILES)
    assert asked == [("owner/adapter", None, FILES), adapter, model]
    asked.clear()
    assert resolve_folders("owner/base", "owner/adapter") == ModelFolders(base, tmp_path / "adapter")
    assert asked == [model, adapter]
    asked.clear()
    resolve_folders("owner/base", str(tmp_path / "adapter"), files=TOKENIZER_FILES)
    assert asked == [("owner/base", None, TOKENIZER_FILES)]


def test_the_revision_is_the_one_that_the_adapter_was_made_for(asked: list[Any]) -> None:
    resolve_folders("owner/fixed", None, files=TOKENIZER_FILES)
    assert asked[-1] == ("owner/base", "v1.5", TOKENIZER_FILES)


def test_files_of_an_adapter_are_no_pickles() -> None:
    names = ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "chat_template.jinja")
    others = ("adapter_model.bin", "model.safetensors", "optimizer.pt", "training_args.bin")
    found = [each for each in (*names, *others) if any(fnmatch(each, form) for form in ADAPTER_FILES)]
    assert found == [*names]


@pytest.mark.parametrize("resolve", [check_names, resolve_folders])
@pytest.mark.parametrize(
    ("named", "lora", "why"),
    [
        ("base", "other", "^--lora other: .*adapter is an adapter itself, and one is merged"),
        (
            "/elsewhere/base",
            None,
            "the base model that adapter_config.json names is not here: /elsewhere/base is",
        ),
        ("", None, "adapter_config.json has no base_model_name_or_path: name the model, and give .* --lora"),
    ],
)
def test_what_cannot_be_resolved(
    resolve: Any, named: str, lora: str | None, why: str, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", WHOLE, named)
    with pytest.raises(ValueError, match=why):
        resolve(str(adapter), lora)


def test_what_is_wrong_with_an_adapter_is_told_before_anything_starts(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", WHOLE, base, peft_type="IA3")
    for model, lora, flag in ((adapter, None, ""), (base, str(adapter), "--lora: ")):
        with pytest.raises(ValueError, match=f"^{flag}{adapter}/adapter_config.json: peft_type is 'IA3'"):
            check_names(str(model), lora)
    with pytest.raises(ValueError, match=r"^--lora: /nowhere/adapter is no folder, and no Hub id"):
        check_names(MODEL_FOLDER, "/nowhere/adapter")
    with pytest.raises(ValueError, match=r"^--lora: .*has no adapter_config\.json"):
        check_names(MODEL_FOLDER, str(tmp_path))
    save_adapter(adapter, WHOLE, base)
    shutil.rmtree(base)
    with pytest.raises(ValueError, match=r"the base model that adapter_config\.json names is not here"):
        check_names(str(adapter), None)
