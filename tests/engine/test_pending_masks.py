"""Masks that take long to find keep only sequences with grammars waiting."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.engine.messages import Request, SamplingParams
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.sequences import grammar
from tests.engine import simulation
from tests.engine.oracle import expected_tokens
from tests.engine.toy_grammar import GRAMMARS

find = grammar.fill_next_token_bitmask_par


def test_tokens_are_the_same_however_long_masks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sequences are preempted, swapped, aborted and ended meanwhile."""
    rng = random.Random(0)
    make_core = simulation.make_core
    found_late: list[bool] = []

    def find_late(*arguments: Any) -> None:
        time.sleep(rng.choice([0.0, 0.0, 0.001, 0.005]))
        find(*arguments)

    def impatient(*arguments: Any, **settings: Any) -> EngineCore:
        core = make_core(*arguments, **settings)
        core.mask_wait = 0.0
        take = core.scheduler.state.pending_masks.take

        def recorded(seconds: float | None) -> Any:
            taken = take(seconds)
            found_late.append(len(core.scheduler.state.pending_masks) > 0)
            return taken

        monkeypatch.setattr(core.scheduler.state.pending_masks, "take", recorded)
        return core

    monkeypatch.setattr(simulation, "make_core", impatient)
    monkeypatch.setattr(grammar, "fill_next_token_bitmask_par", find_late)
    done: Counter[str] = Counter()
    for seed in range(40):
        try:
            done += simulation.simulate(seed, pushed=True)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert done["constrained"] > 40 and done["recomputes"] > 40 and done["swaps"] > 40
    assert sum(found_late) > 100


def test_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def find_at_last(*arguments: Any) -> None:
        assert may_end.wait(60)
        find(*arguments)

    monkeypatch.setattr(grammar, "fill_next_token_bitmask_par", find_at_last)
    core = simulation.make_core(100, 4, 8, 32)
    core.mask_wait = 0.0
    constrained = SamplingParams(n=3, max_tokens=8, seed=1, grammar=GRAMMARS[0])
    plain = SamplingParams(max_tokens=60, seed=2, ignore_eos=True)
    requests = [Request(0, [1, 2, 5], constrained), Request(1, [1, 2], plain)]
    for request in requests:
        core.add(request)
    got: dict[tuple[int, int], list[int]] = {}
    ended: list[int] = []
    while core.has_work:
        for output in core.step():
            got.setdefault((output.request_id, output.index), []).extend(output.tokens)
            if output.finish_reason is not None:
                ended.append(output.request_id)
        check_scheduler(core.scheduler.state)
        if ended == [1] and not may_end.is_set():
            assert [len(got[0, index]) for index in range(3)] == [1, 1, 1]
            may_end.set()
    assert ended == [1, 0, 0, 0]
    for key, tokens in got.items():
        assert tokens == expected_tokens(requests[key[0]], key[1], simulation.EOS)


def test_a_mask_that_cannot_be_found_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    core = simulation.make_core(100, 4, 8, 32)
    constrained = SamplingParams(n=2, max_tokens=8, seed=1, grammar=GRAMMARS[0])
    core.add(Request(0, [1, 2, 5], constrained))
    plain = Request(1, [1, 2], SamplingParams(max_tokens=20, seed=2, ignore_eos=True))
    core.add(plain)
    ends: list[tuple[int, str | None]] = []
    tokens: list[int] = []

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no room for a mask")

    while core.has_work:
        for output in core.step():
            if output.finish_reason is not None:
                ends.append((output.request_id, output.error))
            if output.request_id == plain.id:
                tokens += output.tokens
                monkeypatch.setattr(grammar, "fill_next_token_bitmask_par", fail)  # after the first ones
        check_scheduler(core.scheduler.state)
    failed = "the grammar cannot be followed any further: RuntimeError: no room for a mask"
    assert ends == [(0, failed), (0, failed), (1, None)]
    assert tokens == expected_tokens(plain, 0, simulation.EOS)
