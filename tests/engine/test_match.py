"""A long cached prompt that waits is looked up once; what changes meanwhile is noticed all the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.hashing import BlockHasher, Prefix, Prefixes
from quire.engine.memory.invariants import check_prefix_cache
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.move_ring import MoveRing
from quire.engine.memory.prefix_cache import Match, PrefixCache
from quire.engine.memory.window_group import WindowGroup
from quire.engine.memory.window_match import WindowMatch, match_windows
from quire.engine.messages import Request, SamplingParams
from quire.engine.schedule.scheduler import MAX_SPILLS
from tests.engine.simulation import CheckedBlocks, make_core, plain_match
from tests.engine.tables import Tables

BLOCK_SIZE = 4
CACHED_BLOCKS = 200
FEW = 10  # lookups that a step may take, besides those of what it spills


def chains(hasher: BlockHasher) -> list[list[Prefix]]:
    """The prefixes of prompts that share their beginnings; one object for each prefix of each prompt."""
    made = []
    for prompt in ([0] * 12, [0] * 7 + [1] * 5, [0] * 3 + [2] * 9, [0] * 12):
        prefixes: list[Prefix] = []
        Prefixes(hasher).extend(prefixes, hasher.block_contents(prompt), "")
        made.append(prefixes)
    return made


def change(rng: random.Random, cache: PrefixCache, made: list[list[Prefix]], *, in_host: bool) -> None:
    """Let `cache` find one block more, or one less, or publish one that is computing."""
    block = rng.randrange(30)
    kind = rng.random()
    if block in cache:
        if kind < 0.5 or in_host:
            cache.forget(block)
        elif block in cache.computing:
            cache.publish(cache.prefix(block), block)
    else:
        prefix = rng.choice(rng.choice(made))
        if kind < 0.3 and not in_host:
            cache.mark_computing([prefix], [block])
        else:
            cache.publish(prefix, block)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_caches_go_through_a_match_is_what_a_new_one_would_be(seed: int) -> None:
    rng = random.Random(seed)
    made = chains(BlockHasher(1, seed=0))
    tiers = [PrefixCache(30), PrefixCache(30)]
    matches = [Match([], *tiers) for _ in made]
    for prefixes, match in zip(made, matches, strict=True):
        match.prefixes = prefixes[: rng.choice([5, 12])]
    for _ in range(400):
        cache = rng.choice(tiers)
        change(rng, cache, made, in_host=cache is tiers[1])
        for prefixes, match in zip(made, matches, strict=True):
            if rng.random() < 0.5:
                assert match.renew() == plain_match(match.prefixes, *tiers)
            if rng.random() < 0.02 and len(match.prefixes) < 12:
                match.prefixes.append(prefixes[len(match.prefixes)])
        for tier in tiers:
            check_prefix_cache(tier)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_they_go_through_so_is_a_match_of_windows(seed: int) -> None:
    rng = random.Random(seed)
    made = chains(BlockHasher(1, seed=0))
    groups = [WindowGroup(number, window, 1, 1, 30, MoveRing(60)) for number, window in ((1, 2), (2, 4))]
    host = [PrefixCache(30) for _ in groups] if seed % 2 else []
    matches = [WindowMatch(groups, prefixes[:9], 1, host) for prefixes in made]
    ends = Counter[int]()
    for _ in range(400):
        cache = rng.choice([*(group.cache for group in groups), *host])
        change(rng, cache, made, in_host=cache in host)
        for prefixes, match in zip(made, matches, strict=True):
            for _ in range(rng.randint(0, 3)):
                most = rng.choice([len(match.prefixes), rng.randint(0, len(match.prefixes))])
                expected = match_windows(groups, match.prefixes, most, 1, host)
                assert match.renew(most) == expected
                ends[expected[0]] += 1
            if rng.random() < 0.02 and len(match.prefixes) < 12:
                match.prefixes.append(prefixes[len(match.prefixes)])
    assert len(ends) > 3, "hardly anything is found"


@pytest.mark.parametrize("windows", [(), (2,)])
def test_a_beam_that_goes_on_from_another_is_looked_up_anew(windows: tuple[int, ...]) -> None:
    tables = Tables(12, 2, hasher=BlockHasher(2, seed=0), windows=windows)
    cached = [*tables.group([1, 2, 3, 4]), *tables.group([1, 2, 5, 6])]
    for sequence in cached:
        tables.write(sequence, [])
    tables.step()
    blocks = [sequence.blocks for sequence in cached]
    tables.leave(*cached)
    parent, child = tables.group([1, 2], n=2)
    for beam, tokens in ((parent, [3, 4, 0]), (child, [5, 6, 0])):
        for token in tokens:
            beam.append(token)
    assert [list(tables.blocks.match(beam).on_device) for beam in (parent, child)] == blocks
    child.take_tokens(parent)
    tables.blocks.host.fork(parent, child)
    assert list(tables.blocks.match(child).on_device) == blocks[0]


def counted(method: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        counts[method.__name__] += 1
        return method(*args)

    return counting


@pytest.mark.parametrize("num_host_blocks", [0, CACHED_BLOCKS])
def test_a_long_cached_prompt_at_the_head_of_the_queue_costs_a_step_little(
    num_host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others decode, fill blocks, and push out what is cached: the end of that prompt, too."""
    core = make_core(CACHED_BLOCKS + 40, BLOCK_SIZE, 8, 2000, num_host_blocks=num_host_blocks)
    prompt = [i * 7 % 50 for i in range(CACHED_BLOCKS * BLOCK_SIZE)]
    core.add(Request(0, prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
    while core.has_work:
        core.step()
    for i in range(1, 5):
        core.add(Request(i, [i] * 40, SamplingParams(max_tokens=80, ignore_eos=True)))
    for _ in range(4):
        core.step()
    core.add(Request(9, [*prompt, 1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True)))
    core.step()
    (waiting,) = core.scheduler.state.waiting
    monkeypatch.setattr(CheckedBlocks, "match", BlockManager.match)
    counts: Counter[str] = Counter()
    for cls, name in ((PrefixCache, "find"), (BlockHasher, "next")):
        monkeypatch.setattr(cls, name, counted(getattr(cls, name), counts))
    evictions, steps = core.scheduler.blocks.pool.evictions, 0
    while True:
        counts.clear()
        core.step()
        if not core.scheduler.state.waiting:
            break
        steps += 1
        assert counts["find"] <= FEW + (MAX_SPILLS if num_host_blocks else 0) and counts["next"] <= FEW, (
            f"step {steps} looks up {counts}"
        )
    assert steps > 50
    assert core.scheduler.blocks.pool.evictions > evictions + 20
    assert 0 < waiting.cached_tokens < len(prompt) or num_host_blocks
    assert bool(num_host_blocks) == bool(waiting.cached_host_tokens)


def test_a_long_prompt_whose_windows_are_gone_costs_a_step_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one that runs holds what layers need that keep all, and others fill blocks."""
    prompt = [i * 7 % 50 for i in range(CACHED_BLOCKS * BLOCK_SIZE)]
    core = make_core(4 * CACHED_BLOCKS, BLOCK_SIZE, 8, 2000, windows=(16, 24))
    core.add(Request(0, prompt, SamplingParams(max_tokens=180, ignore_eos=True)))
    for i in range(1, 9):  # these push out the windows' blocks, one after another
        core.add(Request(i, [i] * 200, SamplingParams(max_tokens=1, ignore_eos=True)))
        for _ in range(5):
            core.step()
    for i in range(11, 14):
        core.add(Request(i, [i] * 40, SamplingParams(max_tokens=100, ignore_eos=True)))
    core.step()
    core.add(Request(9, [*prompt, 1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True)))
    core.step()
    (waiting,) = core.scheduler.state.waiting
    monkeypatch.setattr(CheckedBlocks, "match", BlockManager.match)
    counts: Counter[str] = Counter()
    monkeypatch.setattr(PrefixCache, "find", counted(PrefixCache.find, counts))
    added, steps = core.scheduler.blocks.caches[1].times_added, 0
    while True:
        counts.clear()
        core.step()
        if not core.scheduler.state.waiting:
            break
        steps += 1
        assert counts["find"] <= FEW, f"step {steps} looks up {counts}"
    assert steps > 50 and core.scheduler.blocks.caches[1].times_added > added + 50
    assert waiting.cached_tokens == 0
