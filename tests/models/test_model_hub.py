"""A model is a folder, or a Hub id; anything else is refused with what to do."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from quire.engine.models.hub import ELSEWHERE, FILES, resolve_model


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


NO_MODELS = ("./missing", "/missing/model", "a/b/c", "../a", "", "https://host/a", "model.safetensors")
NO_MODELS += ("localhost:8000", "a/b/c:Q8_0")


@pytest.mark.parametrize("name", NO_MODELS)
def test_a_path_that_is_no_folder_is_never_asked_of_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: asked.append(args[0]))
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").touch()
    with pytest.raises(ValueError, match=r"^.+ is (no folder|a file), and no Hub id"):
        resolve_model(name)
    assert asked == []


def test_a_hub_id_is_downloaded_with_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(repo: str, *, tqdm_class: Any, **options: Any) -> str:
        assert repo == "owner/name"
        for name, size in (
            ("huggingface_hub.snapshot_download.transfer", 7),
            ("huggingface_hub.snapshot_download", 100),
        ):
            bar = tqdm_class(total=0, initial=0, unit="B", unit_scale=True, name=name, disable=None)
            bar.total += size
            bar.update(size // 2)
            bar.set_description("half")
            bar.update(size - size // 2)
            bar.close()
        assert list(tqdm_class([1, 2], total=2, desc="files")) == [1, 2]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    seen: list[tuple[int, int]] = []
    assert resolve_model("owner/name", lambda *step: seen.append(step)) == tmp_path
    assert seen == [(50, 100), (100, 100)]


def test_a_failed_download_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route to host\nPlease try again.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"name is no folder here.*no route to host Please try again\. Give"):
        resolve_model("owner/name")


WANTED = (
    "model.safetensors", "model-00001-of-00002.safetensors", "config.json", "chat_template.jinja",
    "tokenizer.model", "additional_chat_templates/tool_use.jinja", "modules.json", "1_Pooling/config.json",
    "2_Dense/config.json", "2_Dense/model.safetensors",
)  # fmt: skip
UNWANTED = (
    "pytorch_model.bin", "consolidated.safetensors", "model.py", "tf_model.h5", "onnx/config.json",
    "original/tokenizer.model", "adapter/additional_chat_templates/tool_use.jinja", "model/model.safetensors",
    "4bit/config.json", "2_Dense/pytorch_model.bin", "onnx/model.safetensors", "30_Dense/model.safetensors",
)  # fmt: skip


def test_only_weights_configs_tokenizers_and_templates_are_asked_for() -> None:
    def asked_for(name: str) -> bool:
        return any(fnmatch(name, each) for each in FILES) and not any(
            fnmatch(name, each) for each in ELSEWHERE
        )

    assert [*filter(asked_for, WANTED + UNWANTED)] == [*WANTED]
