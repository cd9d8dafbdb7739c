"""Every architecture divided among ranks computes what it computes alone, and each reads its share only."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.models import loader
from quire.engine.models.config import ModelConfig
from quire.engine.models.loader import load_model
from quire.engine.models.native_config import read_native
from quire.engine.models.weights import Weights
from quire.engine.parallel.group import OneOfRanks
from quire.kernels.backend import torch_backend
from tests.models.paged_driver import PagedDriver
from tests.models.thread_ranks import Meeting, Rank, on_all
from tests.models.tiny_models import MODELS

PROMPTS = [[5, 9, 7, 30, 31, 32, 33, 34], [11], [40, 3, 41, 2, 50]]
STEPS = 6


def divisible() -> list[tuple[str, int]]:
    """Return the tiny models that 2 or 4 ranks divide."""
    found = []
    for name, (_, values, _) in MODELS.items():
        heads = values.get("num_attention_heads", values.get("n_head", 1))
        found += [(name, ranks) for ranks in (2, 4) if heads % ranks == 0]
    return found


@pytest.mark.parametrize(("name", "ranks"), divisible())
def test_logits_of_ranks_equal_those_of_one(
    name: str, ranks: int, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(name)
    whole = read_native(folder)
    part, meeting = whole.of_rank(ranks), Meeting(ranks)

    def generate(rank: int) -> tuple[list[list[int]], list[Tensor]]:
        model, _ = load_model(
            folder, part, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=64,
            ranks=Rank(rank, meeting),
        )  # fmt: skip
        return PagedDriver(model, part, len(PROMPTS), 64).generate(PROMPTS, STEPS)

    alone, _ = load_model(folder, whole, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=64)
    tokens, logits = PagedDriver(alone, whole, len(PROMPTS), 64).generate(PROMPTS, STEPS)
    for got_tokens, got_logits in on_all(meeting, generate):
        assert got_tokens == tokens
        for rows, expected in zip(got_logits, logits, strict=True):
            torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama3-sharded", "opt", "gpt2"])
def test_ranks_read_and_hold_their_share_only(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(name)
    whole = read_native(folder)
    read: list[str] = []
    opened = loader.open_weights
    monkeypatch.setattr(loader, "open_weights", lambda path: Watched(opened(path), read))
    _, num_bytes = load_model(
        folder, whole, torch_backend(), device="cpu", dtype=torch.float32, max_model_len=64
    )
    in_whole, held = sorted(read), []
    for rank in range(2):
        read.clear()
        _, share = load_model(
            folder, whole.of_rank(2), torch_backend(), device="cpu", dtype=torch.float32, max_model_len=64,
            ranks=OneOfRanks(rank, 2),
        )  # fmt: skip
        held.append(share)
        matrices = [tensor for tensor in in_whole if re.search(r"norm|ln_|bias", tensor) is None]
        replicated = {tensor for tensor in matrices if "positions" in tensor or "wpe" in tensor}
        assert set(read) & set(matrices) == replicated
    assert num_bytes / 2 < held[1] <= held[0] < num_bytes * 0.75


class Watched:
    """A safetensors file that notes what is read as a whole."""

    def __init__(self, file: Any, read: list[str]) -> None:
        self._file = file
        self._read = read

    def get_tensor(self, name: str) -> Tensor:
        self._read.append(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("name", ["llama3-sharded", "mistral-window", "gpt2", "opt"])
def test_dummy_weights_are_those_of_one(name: str, model_folder: Callable[[str], Path]) -> None:
    """Each rank draws its share of the same numbers, whatever number of ranks there is."""
    folder = model_folder(name)
    whole = read_native(folder)

    def drawn(config: ModelConfig, ranks: OneOfRanks | None) -> Weights:
        weights = Weights(torch.device("cpu"), torch.float32, ranks)
        loader.build_model(config, torch_backend(), weights, 64)
        for _ in weights.draw(3):
            pass
        return weights

    alone = drawn(whole, None)
    for rank in range(2):
        weights = drawn(whole.of_rank(2), OneOfRanks(rank, 2))
        assert weights.places.keys() | weights.elsewhere.keys() == alone.places.keys()
        for tensor, place in weights.places.items():
            share = weights.shares.get(tensor)
            expected = alone.places[tensor]
            assert torch.equal(place, expected if share is None else share.of(expected)), tensor


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (3, r"--tensor-parallel-size 3 .* 4 attention heads.*give one of 1, 2, 4"),
        (8, "--tensor-parallel-size 8 .* 4 attention heads"),
    ],
)
def test_what_does_not_divide_the_heads_is_refused(
    ranks: int, message: str, model_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(ValueError, match=message):
        read_native(model_folder("mistral-window")).of_rank(ranks)
