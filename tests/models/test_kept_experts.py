"""Experts' weights stay in the few bits that files have, of a model by transformers' code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.models.float8_files import Float8Tensor
from quire.engine.models.fours_files import FoursTensor
from quire.engine.models.general.expert_weights import ExpertWeights
from quire.engine.models.general.model import GeneralModel
from quire.engine.models.mxfp4_files import Mxfp4Tensor
from quire.engine.models.packed_files import PackedTensor
from quire.engine.models.reading import read_model
from quire.kernels.backend import torch_backend
from tests.models.kept_experts_folder import (
    FORMS,
    KEEPING,
    MOST_APART,
    expanded_in,
    experts_in,
    joined,
    kept_in,
    load,
    load_ranks,
    save,
)
from tests.models.kept_folder import edit, generate, generate_on_ranks


@pytest.mark.parametrize("form", FORMS)
def test_kept_experts_stand_for_the_numbers_that_they_would_be(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are never expanded, and their codes come to a device as other weights do."""
    folder = save(form, tmp_path)
    with monkeypatch.context() as patch:
        read, copied = watch(patch)
        ours, num_bytes = load(folder)
    assert_never_expanded(ours, read, form)
    weights = [weight for each in experts_in(ours) for weight in (each.gate_up, each.down)]
    codes = sum(math.prod(each.shape) // (1 if each.format.codes == "float8" else 2) for each in weights)
    assert sum(copied) >= codes > 0
    other, expanded = load(folder, torch_backend())
    assert num_bytes == expanded + sum(weight.nbytes - 4 * math.prod(weight.shape) for weight in weights)
    kept, numbers = kept_in(ours), expanded_in(other)
    assert len(kept) == len(numbers) > 0
    for each, wanted in zip(kept, numbers, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(each, wanted, strict=True))
    (tokens, logits), (expected, theirs) = generate(ours), generate(other)
    assert tokens == expected
    for each, wanted in zip(logits, theirs, strict=True):
        torch.testing.assert_close(each, wanted, atol=MOST_APART, rtol=1e-4)


def watch(patch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """Return lists that fill: of weights that are expanded, and of bytes that come to a device."""
    read: list[str] = []
    copied: list[int] = []

    def noted(tensor: Any, index: Any, expand: Any) -> Tensor:
        read.append(tensor.name)
        numbers: Tensor = expand(tensor, index)
        return numbers

    def copy(place: Tensor, x: Tensor) -> None:
        copied.append(place.copy_(x).nbytes)

    for kind in (Float8Tensor, PackedTensor, FoursTensor, Mxfp4Tensor):
        expand = kind.__getitem__
        patch.setattr(kind, "__getitem__", lambda tensor, index, of=expand: noted(tensor, index, of))
    patch.setattr("quire.engine.models.general.expert_sources.copies_to", lambda device: copy)
    return read, copied


def assert_never_expanded(model: GeneralModel, read: list[str], form: str) -> None:
    """Neither whole nor in part, in host memory or on the device; what is no expert's is."""
    assert not [name for name in read if ".experts." in name and "shared" not in name]
    assert not [
        name for name, _ in model._causal.named_parameters() if name.endswith(("up_proj", "down_proj"))
    ]
    assert bool(read) == (form != "mxfp4")


@pytest.mark.parametrize("form", ["blocks of qwen3_moe", "gptq of qwen3_moe"])
def test_the_host_waits_for_the_device_once_for_a_layer(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would at each number that it reads of what is on a GPU."""
    folder, fill, waits = save(form, tmp_path), ExpertWeights.fill, Counter[str]()

    def counted(weights: ExpertWeights) -> None:
        with monkeypatch.context() as patch:
            for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
                patch.setattr(Tensor, name, counting(name))
            fill(weights)

    def counting(name: str) -> Callable[[Tensor], Any]:
        own = getattr(Tensor, name)

        def read(tensor: Tensor) -> Any:
            waits[name] += 1
            return own(tensor)

        return read

    monkeypatch.setattr(ExpertWeights, "fill", counted)
    layers = len(experts_in(load(folder)[0]))
    assert waits.total() == layers > 1


@pytest.mark.parametrize(
    ("form", "part", "wrong"),
    [
        ("blocks of qwen3_moe", "weight", lambda codes: codes.view(torch.uint8)[7, 9].fill_(0xFF)),
        ("blocks of qwen3_moe", "weight_scale_inv", lambda scales: scales[1, 0].fill_(torch.inf)),
        ("gptq of qwen3_moe", "scales", lambda scales: scales[0, 5].fill_(torch.nan)),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_name(
    form: str, part: str, wrong: Any, tmp_path: Path
) -> None:
    folder, name = save(form, tmp_path), "model.layers.1.mlp.experts.3.up_proj"
    edit(folder, lambda tensors: wrong(tensors[f"{name}.{part}"]))
    with pytest.raises(ValueError, match=rf"{name}\.\w+ stands for numbers that are not finite"):
        load(folder)


WHOLE_ONES = pytest.mark.parametrize("whole_ones", [False, True], ids=["by columns", "whole experts"])


@WHOLE_ONES
@pytest.mark.parametrize("form", ["mxfp4", "mxfp4 of qwen3_moe", "blocks of qwen3_moe", "awq of qwen3_moe"])
def test_ranks_keep_their_shares(form: str, whole_ones: bool, tmp_path: Path) -> None:
    folder = save(form, tmp_path)
    whole, ranks = load(folder)[0], load_ranks(folder, 2, whole_ones=whole_ones)
    for parts, wanted in zip(joined(ranks, whole_ones=whole_ones), kept_in(whole), strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, wanted[:2], strict=True))


@WHOLE_ONES
@pytest.mark.parametrize("form", ["mxfp4", "blocks of qwen3_moe"])
def test_ranks_compute_by_their_shares_what_one_alone_does(
    form: str, whole_ones: bool, tmp_path: Path
) -> None:
    """With biases, which one of them adds, and without."""
    folder = save(form, tmp_path)
    part = read_model(folder, "transformers").of_rank(2, expert_parallel=whole_ones)
    expected, logits = generate(load(folder)[0])
    for tokens, theirs in generate_on_ranks(folder, part, 2, KEEPING)[1]:
        assert tokens == expected
        for each, wanted in zip(theirs, logits, strict=True):
            torch.testing.assert_close(each, wanted, atol=MOST_APART, rtol=1e-4)
