"""Blocks of every size give the same tokens: chunked, found, copied, recomputed, swapped and rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config import BLOCK_SIZES, EngineConfig
from quire.engine.registry.prompt_hasher import PromptHasher
from tests.engine.test_equality_matrix import KINDS, Answers, requests, run, start, tokens_of
from tests.models.tiny_models import MODELS

SLOTS, FEW_SLOTS = 3200, 144
# Each size is in each cell with some kind of request. All are held to 16.
SIZES = {"greedy": (1, 8), "n": (2, 4), "beam": (1, 4)}
CELLS: dict[str, dict[str, Any]] = {
    "chunked and found": {"max_num_batched_tokens": 12, "enable_prefix_caching": True},
    "recompute": {"num_slots": FEW_SLOTS, "preemption_mode": "recompute"},
    "swap": {"num_slots": FEW_SLOTS, "preemption_mode": "swap", "swap_space": 1},
}


def answers_of(
    folder: Path, vocab_size: int, block_size: int, kind: dict[str, Any], settings: dict[str, Any]
) -> tuple[Answers, int]:
    """Return what all requests get on a CPU in blocks of this size, and how often one was preempted.

    With a prefix cache they come twice, and get the same.
    """
    num_blocks = settings.get("num_slots", SLOTS) // block_size
    others = {name: value for name, value in settings.items() if name != "num_slots"}
    memory = {"block_size": block_size, "num_gpu_blocks_override": num_blocks}
    core = start(folder, {"device": "cpu", **memory, **others})
    asked = requests(vocab_size, kind)
    answers = run(core, asked, overlap=True)
    if others.get("enable_prefix_caching"):
        again = run(core, asked, overlap=True)
        assert {key: tokens_of(each) for key, each in again.items()} == {
            key: tokens_of(each) for key, each in answers.items()
        }
        for request in asked:
            length = len(request.prompt)
            most = min(length // block_size * block_size, length - 1)
            assert again[request.id, 0][0].cached_tokens == most
    stats = core.stats
    done = {"recompute": stats.preemptions_recompute, "swap": stats.preemptions_swap}
    assert sum(done.values()) == done.get(others.get("preemption_mode"), 0)
    assert stats.active_blocks == 0
    return answers, sum(done.values())


@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_do_not_depend_on_the_block_size(
    kind: str, cell: str, model_folder: Callable[[str], Path]
) -> None:
    name, expected, preemptions = "qwen3", {}, []
    for block_size in (16, *SIZES[kind]):
        vocab_size = MODELS[name][1]["vocab_size"]
        answers, preempted = answers_of(model_folder(name), vocab_size, block_size, KINDS[kind], CELLS[cell])
        got = {key: tokens_of(outputs) for key, outputs in answers.items()}
        expected = expected or got
        assert got == expected, f"blocks of {block_size}"
        preemptions.append(preempted)
    assert any(preemptions[1:]) == ("preemption_mode" in CELLS[cell])


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp12_e4m7"])
def test_a_rounded_cache_rounds_alike_in_blocks_of_any_size(
    kv_cache_dtype: str, model_folder: Callable[[str], Path]
) -> None:
    name, expected = "llama3-sharded", {}
    settings = {"kv_cache_dtype": kv_cache_dtype, "enable_prefix_caching": True}
    for block_size in (16, 1, 4):
        vocab_size = MODELS[name][1]["vocab_size"]
        answers, _ = answers_of(model_folder(name), vocab_size, block_size, KINDS["greedy"], settings)
        got = {key: tokens_of(outputs) for key, outputs in answers.items()}
        expected = expected or got
        assert got == expected, f"blocks of {block_size}"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_router_hashes_prompts_in_blocks_of_any_size(block_size: int) -> None:
    hasher = PromptHasher(block_size, 0)
    tokens = list(range(3 * block_size))
    digests = hasher.digests("", tokens)
    assert len(set(digests)) == len(digests) == 3


@pytest.mark.parametrize("block_size", [0, 3, 6, 12, 2048])
def test_other_sizes_are_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="--block-size must be one of"):
        EngineConfig(model="any", block_size=block_size)
