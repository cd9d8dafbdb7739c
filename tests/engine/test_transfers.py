"""Transfers between the tiers may take longer than their steps: nobody waits for them who need not."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.core import EngineCore
from quire.engine.device.kv_cache import KVCache, bytes_per_block, touched
from quire.engine.messages import Request, SamplingParams
from quire.engine.models.native_config import read_native
from quire.engine.schedule.invariants import check_scheduler
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.pointwise.block_copy import copy_blocks_reference
from tests.engine.oracle import OracleHandle, OracleRunner, expected_tokens
from tests.engine.simulation import make_core

BLOCK_SIZE = 4


def pressed_core() -> tuple[EngineCore, list[Request]]:
    """Room for three of six groups at their longest; transfers end only when they are waited for."""
    requests = [
        Request(i, [i] * 8, SamplingParams(max_tokens=16 + i, ignore_eos=True, seed=i)) for i in range(6)
    ]
    core = make_core(18, BLOCK_SIZE, 8, 64, caching=False, num_host_blocks=18, mode="swap")
    assert isinstance(core.runner, OracleRunner)
    core.runner.delay = lambda: 1 << 40
    for request in requests:
        core.add(request)
    return core, requests


def test_others_go_on_while_a_transfer_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    core, requests = pressed_core()
    waited: list[int] = []  # tokens that had come by then
    got: dict[int, list[int]] = {request.id: [] for request in requests}

    def has_moved(handle: OracleHandle, *, wait: bool = False) -> bool:
        if wait:
            assert not core.scheduler.state.in_flight, "a transfer was waited for beside a step"
            waited.append(sum(map(len, got.values())))
            handle.arrive()
        return wait

    monkeypatch.setattr(OracleHandle, "has_moved", has_moved)
    under_way = 0  # steps that gave tokens while a transfer was under way
    while core.has_work:
        moving = len(core.scheduler.state.transfers) > 0
        outputs = list(core.step())
        under_way += moving and bool(outputs)
        for output in outputs:
            got[output.request_id] += output.tokens
        check_scheduler(core.scheduler.state)
    assert all(got[request.id] == expected_tokens(request, 0) for request in requests)
    assert core.scheduler.preemption.swaps > 0 and waited and under_way > 10
    assert core.scheduler.blocks.pool.num_free == 18


def test_a_client_that_leaves_during_a_long_transfer_leaks_nothing() -> None:
    core, requests = pressed_core()
    while not len(core.scheduler.state.transfers):
        core.step()
    assert core.scheduler.blocks.pool.num_in_transfer > 0
    for request in requests:
        core.abort(request.id)
    check_scheduler(core.scheduler.state)
    while core.has_work:
        assert not list(core.step())
        check_scheduler(core.scheduler.state)
    blocks = core.scheduler.blocks
    assert [blocks.pool.num_free, blocks.host.pool.num_free] == [18, 18]


@pytest.mark.parametrize("fails", [False, True])
def test_host_memory_is_touched_by_all_processors(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """However few threads compute, before and afterwards."""
    zeros, seen = torch.zeros, []

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if fails:
            raise MemoryError
        return zeros(*arguments, **options)

    monkeypatch.setattr(torch, "zeros", counted)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.raises(MemoryError) if fails else nullcontext():
            assert not touched((3, 70_000)).any()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert seen == [len(os.sched_getaffinity(0))]


def test_blocks_that_follow_each_other_are_copied_together(model_folder: Callable[[str], Path]) -> None:
    config = read_native(model_folder("qwen3"))
    cache = KVCache(config, 40, 4, UNSCALED[torch.float32], torch.device("cpu"), copy_blocks_reference)
    cache.add_host_tier(40)
    assert cache.host is not None
    rng = random.Random(5)
    width = bytes_per_block(config, 4, UNSCALED[torch.float32])
    for count in (0, 1, 2, 7, 20):
        starts = rng.sample(range(0, 40, 2), count)
        pairs = [
            (block, other) for block, other in zip(starts, rng.sample(range(0, 40, 2), count), strict=True)
        ]
        runs = [(a + i, b + i) for a, b in pairs for i in range(rng.choice([1, 2]))]
        moves = np.array(runs, np.int32).reshape(-1, 2)
        cache.blocks.copy_(torch.randint(0, 256, (40, width), dtype=torch.uint8))
        cache.host.copy_(torch.randint(0, 256, (40, width), dtype=torch.uint8))
        device, host = cache.blocks.clone(), cache.host.clone()
        nothing = np.zeros((0, 2), np.int32)
        cache.swap(moves, nothing)
        for block, other in runs:
            host[other] = device[block]
        assert torch.equal(cache.host, host) and torch.equal(cache.blocks, device)
        cache.host.copy_(torch.randint(0, 256, (40, width), dtype=torch.uint8))
        host = cache.host.clone()
        cache.swap(nothing, moves)
        for source, destination in runs:
            device[destination] = host[source]
        assert torch.equal(cache.blocks, device) and torch.equal(cache.host, host)


def test_host_blocks_are_pinned_while_the_cache_is_there(model_folder: Callable[[str], Path]) -> None:
    config = read_native(model_folder("qwen3"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cache = KVCache(config, 5, 16, UNSCALED[torch.float32], device, copy_blocks_reference)
    cache.add_host_tier(3)
    host = cache.host
    assert host is not None and len(host) == 3
    assert host.is_pinned() == (device.type == "cuda")
    del cache
    assert not host.is_pinned()
