"""What the command that measures loading saves, reads and tells."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quire.loadtest import loading_time, model_configs


def test_a_folder_is_saved_in_shards_and_loaded_both_ways(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = model_configs.sizes(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=96)
    config = model_configs.LLAMA | small | {"head_dim": 32, "vocab_size": 300, "max_position_embeddings": 512}
    monkeypatch.setattr(model_configs, "CONFIGS", {"small": config})
    monkeypatch.setattr(loading_time, "SHARD", "100KB")
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["", "--models", "small", "--runs", "1", "--json", str(result)])
    assert loading_time.main() == 0
    figures = json.loads(result.read_text())["models"]["small"]
    assert json.loads(capsys.readouterr().out.removeprefix("small ")) == figures
    weights = 2 * (2 * 300 * 64 + 2 * (4 * 64 * 64 - 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64) + 64)
    assert weights < figures["bytes"] < weights + 20_000  # and headers
    assert set(figures["seconds"]) == {"read", "native", "transformers"}
    assert set(figures["of_the_read"]) == {"native", "transformers"}
