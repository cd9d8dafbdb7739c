"""One model over several ranks, processes of their own, gives the tokens and log-probabilities of one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from quire.engine.config import EngineConfig, KVCacheDtype, PreemptionMode
from quire.engine.core import EngineCore
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.parallel.leader import LeadingRunner
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.preemption import PreemptionPolicy
from quire.engine.startup import start_engine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gpu_tensor_parallel has ranks on GPUs")

GREEDY: dict[str, Any] = {"temperature": 0.0}
KINDS: list[dict[str, Any]] = [
    GREEDY | {"logprobs": 3, "prompt_logprobs": 2},
    {"n": 3, "top_p": 0.9},
    GREEDY | {"beam_width": 3, "n": 3, "early_stopping": "never"},
    {"min_p": 0.1, "temperature": 1.5, "top_k": 9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "top_k": 20, "top_p": 0.8},
    {"logit_bias": {7: 4.0, 150: 3.0}, "logprobs": 0},
]


def start(folder: Path, ranks: int, cache: KVCacheDtype = "model") -> EngineCore:
    """Start so small an engine that prompts come in chunks and rows yield."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=96,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=12,
        swap_space=0.01,
        preemption_mode="swap",
        kv_cache_dtype=cache,
        tensor_parallel_size=ranks,
    )
    return start_engine(config)[0]


@pytest.fixture(scope="module")
def alone(llama: tuple[Path, LlamaForCausalLM]) -> EngineCore:
    return start(llama[0], 1)


@pytest.fixture(scope="module", params=[2, 4])
def divided(llama: tuple[Path, LlamaForCausalLM], request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """The model has 2 KV heads, which 4 ranks repeat, and 199 tokens, which neither divides."""
    core = start(llama[0], request.param)
    assert isinstance(core.runner, LeadingRunner)
    yield core
    core.runner.leader.close()


def answers(core: EngineCore, mode: PreemptionMode) -> dict[tuple[int, int], list[Output]]:
    """Run requests of all kinds, two of each beginning alike, with rows that yield in a mode."""
    core.scheduler.preemption.policy = PreemptionPolicy(mode=mode)
    preemption, first = core.scheduler.preemption, 100 * (mode == "swap")
    before = preemption.swaps, preemption.recomputes
    rng = random.Random(0)
    prefix = [rng.randrange(4, 199) for _ in range(20)]
    found: dict[tuple[int, int], list[Output]] = {}
    for i, params in enumerate(KINDS):
        own = [rng.randrange(4, 199) for _ in range(rng.randint(1, 30))]
        wanted = SamplingParams(max_tokens=rng.randint(12, 18), ignore_eos=True, seed=i, **params)
        core.add(Request(first + i, prefix * (i % 2) + own, wanted, cache_salt=mode))
    while core.has_work:
        for output in core.step():
            assert output.error is None
            found.setdefault((output.request_id - first, output.index), []).append(output)
        check_scheduler(core.scheduler.state)
    after = preemption.swaps, preemption.recomputes
    assert after[0 if mode == "swap" else 1] > before[0 if mode == "swap" else 1]
    return found


def test_ranks_give_what_one_gives_with_a_cache_in_8_bits(llama: tuple[Path, LlamaForCausalLM]) -> None:
    """Each rank has its own heads' vectors, and their scales."""
    alone, divided = (start(llama[0], ranks, "fp8_e4m3") for ranks in (1, 2))
    expected, got = (answers(core, "swap") for core in (alone, divided))
    assert {key: tokens_of(outputs) for key, outputs in got.items()} == {
        key: tokens_of(outputs) for key, outputs in expected.items()
    }


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_ranks_give_what_one_gives(alone: EngineCore, divided: EngineCore, mode: PreemptionMode) -> None:
    expected, got = (answers(core, mode) for core in (alone, divided))
    assert got.keys() == expected.keys()
    for key, outputs in expected.items():
        assert tokens_of(got[key]) == tokens_of(outputs), key
        torch.testing.assert_close(logprobs_of(got[key]), logprobs_of(outputs), atol=1e-4, rtol=0)


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def logprobs_of(outputs: list[Output]) -> torch.Tensor:
    """Return all log-probabilities that came, of prompts and of beams too."""
    entries = [
        entry
        for output in outputs
        for entry in [*(output.logprobs or []), *(output.prompt_logprobs or [])]
        if entry is not None
    ]
    beams = [output.cumulative_logprob for output in outputs if output.cumulative_logprob is not None]
    return torch.tensor(
        [*(number for entry in entries for number in [entry.logprob, *entry.top_logprobs]), *beams]
    )
