"""Experts' weights in few bits that are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.models.general.model import GeneralModel
from tests.models.kept_experts_folder import (
    FORMS,
    experts_in,
    joined,
    kept_in,
    load,
    load_ranks,
    same,
    save,
)
from tests.models.kept_folder import generate


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


def test_they_are_the_same_however_many_numbers_are_rounded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("mxfp4", tmp_path)
    whole = load(folder, load_format="dummy")[0]
    monkeypatch.setattr("quire.engine.models.drawn_weights.PIECES", {"cpu": 1000})
    assert same(kept_in(load(folder, load_format="dummy")[0]), kept_in(whole))
