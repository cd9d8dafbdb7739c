"""The folders that benchmarks with dummy weights take as models."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from quire.loadtest import model_configs


def test_a_folder_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["model_configs", str(tmp_path / "models")])
    model_configs.main()
    folders = sorted((tmp_path / "models").iterdir())
    names = ["llama-70b", "llama-8b", "opt-13b", "qwen3-0.6b", "qwen3-14b"]
    assert [folder.name for folder in folders] == names
    for folder in folders:
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        assert size == model_configs.CONFIGS[folder.name]["vocab_size"]


def test_a_folder_that_cannot_be_made_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["model_configs", str(tmp_path / "file")])
    with pytest.raises(SystemExit, match=r"^2$"):
        model_configs.main()
    assert re.search(rf"error: {tmp_path}/file/\S+: Not a directory; give ", capsys.readouterr().err)


def test_help_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["model_configs", "--help"])
    with pytest.raises(SystemExit) as end:
        model_configs.main()
    assert not end.value.code and "opt-13b" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
