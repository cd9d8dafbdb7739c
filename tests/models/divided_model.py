"""Any causal model type of transformers, tiny and random, divided among ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from quire.engine.device.block_size import in_blocks
from quire.engine.models.config import ModelConfig
from quire.engine.models.general import causal
from quire.engine.models.general.division.divide import refuse_undividable
from quire.engine.models.loader import load_model
from quire.engine.models.reading import read_model
from quire.kernels.backend import Backend, torch_backend
from quire.kernels.formats.kv_format import UNSCALED
from tests.models.any_model import LEAST_AGREEMENT, LENGTHS, MAX_LEN, STEPS, Verdict, difference, prompts
from tests.models.paged_driver import BLOCK_SIZE, PagedDriver
from tests.models.thread_ranks import Meeting, Rank, on_all

Result = TypeVar("Result")


def compare_divided(
    folder: Path, reference: Any, ranks: int, backend: Backend | None = None, *, expert_parallel: bool = False
) -> Verdict:
    """Compare logits of ranks, of the model that is in the folder, with those that transformers has of it."""
    try:
        part = read_model(folder, "transformers").of_rank(ranks, expert_parallel=expert_parallel)
        refuse_undividable(folder, part)
        part, _ = in_blocks(part, BLOCK_SIZE, UNSCALED[torch.float32], torch.float32)
    except ValueError as error:
        return Verdict("refused", str(error))
    generated = generate_divided(folder, part, ranks, backend)
    if any(tokens != generated[0][0] for tokens, _ in generated):
        return Verdict("unequal", "ranks have different tokens")
    worst = max(difference(each, reference) for each in generated)
    return Verdict("equal" if worst < LEAST_AGREEMENT else "unequal", f"{worst:.1g}")


def generate_divided(
    folder: Path, part: ModelConfig, ranks: int, backend: Backend | None = None
) -> list[tuple[list[list[int]], list[Tensor]]]:
    """Return what each rank of a folder's model generates. part: the model as each of them computes it."""

    def generate(model: Any) -> tuple[list[list[int]], list[Tensor]]:
        return PagedDriver(model, part, len(LENGTHS) + 1, MAX_LEN).generate(prompts(), STEPS)

    return on_ranks(folder, part, [backend or torch_backend()] * ranks, generate)


def on_ranks(
    folder: Path, part: ModelConfig, backends: Sequence[Backend], work: Callable[[Any], Result]
) -> list[Result]:
    """Return what is made of each rank's model of a folder, all at the same time; each has a backend."""
    meeting, turn, load_shares = Meeting(len(backends)), threading.Lock(), causal._load_shares

    def in_turn(*given: Any) -> Any:
        with turn:  # transformers' loader is of one thread
            return load_shares(*given)

    def load(rank: int) -> Result:
        model, _ = load_model(
            folder, part, backends[rank], device="cpu", dtype=torch.float32, max_model_len=MAX_LEN,
            ranks=Rank(rank, meeting),
        )  # fmt: skip
        return work(model)

    with patch.object(causal, "_load_shares", in_turn):
        return on_all(meeting, load)
