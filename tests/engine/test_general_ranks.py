"""A model by transformers' code over ranks that are processes gives the tokens of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.parallel.leader import LeadingRunner
from quire.engine.startup import start_engine
from tests.models.any_model import save_tiny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are processes without GPUs here")

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"n": 2, "seed": 5, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.0, "beam_width": 2, "n": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    save_tiny("qwen3_moe", folder)
    return folder


def start(folder: Path, **settings: Any) -> EngineCore:
    """Start so small an engine that prompts come in chunks."""
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_num_seqs=6, max_num_batched_tokens=16,
        num_gpu_blocks_override=40, **settings,
    )  # fmt: skip
    return start_engine(config)[0]


def answers(core: EngineCore) -> list[list[int]]:
    """Run requests of each kind, of which the second round finds prompts in the cache."""
    tokens: dict[tuple[int, int], list[int]] = {}
    for first in (0, len(KINDS)):
        for at, params in enumerate(KINDS):
            prompt = [3 + (7 * place + at) % 90 for place in range(25)]
            core.add(Request(first + at, prompt, SamplingParams(max_tokens=9, ignore_eos=True, **params)))
        while core.has_work:
            for output in core.step():
                assert output.error is None
                tokens.setdefault((output.request_id, output.index), []).extend(output.tokens)
    return [tokens[key] for key in sorted(tokens)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    return answers(start(folder))


@pytest.fixture
def divided(folder: Path) -> Iterator[EngineCore]:
    core = start(folder, tensor_parallel_size=2)
    assert isinstance(core.runner, LeadingRunner)
    yield core
    core.runner.leader.close()


def test_ranks_give_what_one_gives(alone: list[list[int]], divided: EngineCore) -> None:
    assert answers(divided) == alone
