"""Pinned prefixes: computed at start, found by every tenant and never evicted; nothing else is shared."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.device.runner import ModelRunner
from quire.engine.messages import Output, Request, SamplingParams
from quire.engine.pinned_prefixes import pin_prefixes
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.startup import start_engine
from tests.models.any_model import save_tiny

SIZE = 16
RNG = random.Random(4)
SYSTEM = [RNG.randrange(2, 199) for _ in range(3 * SIZE + 5)]  # three whole blocks, and five tokens of one
LONGER = SYSTEM[: 2 * SIZE] + [RNG.randrange(2, 199) for _ in range(2 * SIZE)]  # shares two of its four


def make_core(folder: Path, num_blocks: int, **settings: object) -> EngineCore:
    config = EngineConfig(
        model=str(folder),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=num_blocks,
        **settings,
    )
    return start_engine(config)[0]


def run(core: EngineCore, prompts: list[list[int]], salt: str) -> list[tuple[list[int], int]]:
    """The tokens of each prompt's answer, and how many of the prompt were found in the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add(Request(i, prompt, params, cache_salt=salt))
    outputs: dict[int, list[Output]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        check_scheduler(core.scheduler.state)
        stats = core.stats
        in_transfer = core.scheduler.blocks.pool.num_in_transfer
        known = stats.free_blocks + stats.active_blocks + stats.cached_blocks + in_transfer
        assert known == core.scheduler.blocks.pool.num_blocks
    return [
        ([token for output in outputs[i] for token in output.tokens], outputs[i][0].cached_tokens)
        for i in range(len(prompts))
    ]


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    tail = [rng.randrange(2, 199) for _ in range(2 * SIZE)]
    return [SYSTEM + tail, LONGER + tail, SYSTEM[: 3 * SIZE], SYSTEM[:SIZE] + tail, tail]


FOUND = [3 * SIZE + 5, 4 * SIZE, 3 * SIZE - 1, SIZE, 0]  # of a prompt found whole the last token is computed


@pytest.mark.parametrize("swap_space", [0, 1])
def test_every_tenant_finds_them_whatever_came_in_between(
    llama: tuple[Path, LlamaForCausalLM], swap_space: int
) -> None:
    expected = [tokens for tokens, _ in run(make_core(llama[0], 64), prompts(), "")]
    core = make_core(llama[0], 20, swap_space=swap_space)
    assert pin_prefixes(core, [SYSTEM, LONGER, SYSTEM]) == 6
    assert (core.stats.active_blocks, core.stats.cached_blocks, core.stats.free_blocks) == (0, 6, 14)
    rng = random.Random(6)
    for tenant in ("one", "two", ""):
        for i, prompt in enumerate(prompts()):  # one by one: what others of the tenant compute is found too
            ((tokens, cached),) = run(core, [prompt], f"{tenant}{i}")
            assert (tokens, cached) == (expected[i], FOUND[i])
        flood = [[rng.randrange(2, 199) for _ in range(4 * SIZE)] for _ in range(8)]
        run(core, flood, "flood")
        assert core.scheduler.blocks.pool.evictions > 0
    assert [tokens for tokens, _ in run(core, prompts() * 2, "one")] == expected * 2
    assert core.stats.active_blocks == core.stats.tokens_filled == 0


def test_what_comes_after_them_is_each_tenants_own(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core = make_core(llama[0], 64)
    pin_prefixes(core, [SYSTEM])
    prompt = SYSTEM[: 3 * SIZE] + [9] * (2 * SIZE + 1)
    assert [run(core, [prompt], salt)[0][1] // SIZE for salt in ("one", "two", "one", "two")] == [3, 3, 5, 5]


def test_no_request_is_let_in_that_needs_their_blocks(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core = make_core(llama[0], 10)
    pin_prefixes(core, [SYSTEM])
    params = SamplingParams(max_tokens=1)
    with pytest.raises(ValueError, match=r"up to 7 KV blocks.* there are only 6"):
        core.add(Request(0, [5] * (6 * SIZE + 1), params))
    core.add(Request(0, [5] * (6 * SIZE), params))


def test_too_many_empty_ones_or_no_cache_are_refused_with_the_numbers(
    llama: tuple[Path, LlamaForCausalLM],
) -> None:
    core = make_core(llama[0], 9)
    with pytest.raises(ValueError, match="needs 6 KV blocks of 16 tokens, but at most 4 of the 9"):
        pin_prefixes(core, [SYSTEM, LONGER])
    with pytest.raises(ValueError, match=r"prefix 2 of --pin-prefix has no tokens"):
        pin_prefixes(core, [SYSTEM, []])
    with pytest.raises(ValueError, match=rf"the longest is prefix 2, with {len(LONGER)} tokens"):
        pin_prefixes(core, [SYSTEM, LONGER])
    assert not core.has_work and core.stats.cached_blocks == 0
    with pytest.raises(ValueError, match="--no-enable-prefix-caching"):
        pin_prefixes(make_core(llama[0], 9, enable_prefix_caching=False), [SYSTEM])


def test_a_prefix_that_cannot_be_computed_is_named(
    llama: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    """One longer than the context; in a pool of windows one that needs more at once than is kept of it."""
    long = SYSTEM * 2
    named = rf"prefix 2 of --pin-prefix has {len(long)} tokens and cannot be computed: the "
    with pytest.raises(ValueError, match=named + r"prompt has .* --max-model-len"):
        pin_prefixes(make_core(llama[0], 128, max_model_len=64), [SYSTEM, long])
    save_tiny("starcoder2", tmp_path, sliding_window=7)
    # On a GPU more is kept of a window than fits here.
    core = make_core(tmp_path, 5, enable_prefix_caching=True, device="cpu")
    with pytest.raises(ValueError, match=named + r"request needs up to \d+ KV blocks .* there are only 5"):
        pin_prefixes(core, [[5], [5] * len(long)])


def test_the_last_block_is_shared_as_far_as_it_agrees_and_never_written(
    llama: tuple[Path, LlamaForCausalLM],
) -> None:
    """Nobody changes it: whoever goes on behind it, or leaves it midway, writes to a copy."""
    rng = random.Random(7)
    alone = make_core(llama[0], 64)
    core = make_core(llama[0], 64)
    pin_prefixes(core, [SYSTEM])
    (block,) = core.scheduler.blocks.tails.blocks()
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    content = runner.cache.blocks[block].clone()
    for common in (5, 5, 3, 1, 0):
        prompt = SYSTEM[: 3 * SIZE + common] + [(SYSTEM[3 * SIZE] + 1) % 199] * (not common)
        prompt += [rng.randrange(2, 199) for _ in range(3)] if common else []
        before = core.scheduler.blocks.copies_on_write
        ((tokens, cached),) = run(core, [prompt], f"{common} {len(prompt)}")
        assert tokens == run(alone, [prompt], "")[0][0]
        assert cached >= 3 * SIZE + common and (cached == 3 * SIZE + common or common < 5)
        assert core.scheduler.blocks.copies_on_write == before + (cached > 3 * SIZE)
        assert torch.equal(runner.cache.blocks[block, :], content)
    assert core.scheduler.blocks.pool.is_pinned(block)


def test_a_prompt_that_ends_in_it_computes_its_last_token(llama: tuple[Path, LlamaForCausalLM]) -> None:
    core = make_core(llama[0], 64)
    expected = [tokens for tokens, _ in run(core, [SYSTEM, SYSTEM[:-2], SYSTEM[: 3 * SIZE + 1]], "")]
    core = make_core(llama[0], 64)
    pin_prefixes(core, [SYSTEM])
    for prompt, tokens in zip((SYSTEM, SYSTEM[:-2], SYSTEM[: 3 * SIZE + 1]), expected, strict=True):
        assert run(core, [prompt], "") == [(tokens, len(prompt) - 1)]


def test_a_prefix_of_less_than_a_block_is_shared_by_all_tenants(llama: tuple[Path, LlamaForCausalLM]) -> None:
    short = SYSTEM[: SIZE - 1]
    prompt = [*short, 7, 8, 9]
    expected = run(make_core(llama[0], 64), [prompt], "")[0][0]
    core = make_core(llama[0], 20)
    assert pin_prefixes(core, [short]) == 1
    for tenant in ("one", "two", ""):
        flood = [[(17 * i + 5 * j) % 197 + 2 for j in range(4 * SIZE)] for i in range(8)]
        run(core, flood, "flood")
        assert run(core, [prompt], tenant) == [(expected, SIZE - 1)]


@pytest.mark.parametrize(
    "params", [{"n": 2, "temperature": 1.0}, {"beam_width": 2, "n": 2, "temperature": 0.0}]
)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_samples_and_beams_go_on_from_it_whatever_becomes_of_them(
    llama: tuple[Path, LlamaForCausalLM], params: dict[str, object], mode: str
) -> None:
    """Forked behind it, preempted and back: the tokens are those of an engine without pinned prefixes."""

    def answers(core: EngineCore) -> dict[tuple[int, int], list[int]]:
        for i in range(4):
            settings = SamplingParams(max_tokens=40, ignore_eos=True, seed=i, **params)
            core.add(Request(i, [*SYSTEM, 20 + i, 30 + i], settings))
        got: dict[tuple[int, int], list[int]] = {}
        while core.has_work:
            for output in core.step():
                got.setdefault((output.request_id, output.index), []).extend(output.tokens)
            check_scheduler(core.scheduler.state)
        return got

    expected = answers(make_core(llama[0], 64, enable_prefix_caching=False, swap_space=0))
    core = make_core(llama[0], 13, preemption_mode=mode, swap_space=1)  # nine beside what is pinned
    pin_prefixes(core, [SYSTEM])
    assert answers(core) == expected
    stats = core.stats
    assert (stats.preemptions_recompute > 0, stats.preemptions_swap > 0) == (
        mode == "recompute",
        mode == "swap",
    )
