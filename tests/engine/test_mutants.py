"""The tests of memory and scheduling notice mistakes: each mutant of the engine fails one of them."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

import pytest

import quire.engine
from tests.engine.mutants import MUTANTS, NOTICED_BY, Mutant
from tests.engine.test_scheduler import CHUNKS, PUSHED_CHUNKS, SEEDS

# These reach rare corners, some only where groups are pushed out.
RARE = [170, 315, 349, 422, 613, 2656]
PUSHED = [2, 7, 9, 24, 39, 43, 50, 60, 147, 275, 296, 370, 1855]
COMMON = range(60)
BROKEN = (SyntaxError, ImportError, NameError)  # the mutant's own fault
ENGINE = Path(quire.engine.__file__).parent


class MutantLoader(Loader):
    """Finds and loads one module of the engine with a piece of its source replaced."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = f"quire.engine.{mutant.module}"
        path = ENGINE / f"{mutant.module.replace('.', '/')}.py"
        source = path.read_text()
        assert source.count(mutant.source) == 1, (
            f"{mutant.name}: not found once in {path.name}: {mutant.source}"
        )
        self.code: CodeType = compile(source.replace(mutant.source, mutant.instead), str(path), "exec")

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Everything of the engine that is imported within is a new copy, with the mistake in it."""

    def ours(name: str) -> bool:
        return name.startswith(("quire.engine.", "tests.engine."))

    loader = MutantLoader(mutant)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
    sys.meta_path.insert(0, loader)
    try:
        yield
    finally:
        sys.meta_path.remove(loader)
        for name in list(sys.modules):
            if ours(name):
                del sys.modules[name]
        sys.modules.update(before)
        for name, module in before.items():
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)


def examples() -> None:
    for file in ("test_prefix_sharing", "test_block_manager", "test_pinned_tails"):
        module = importlib.import_module(f"tests.engine.{file}")
        for name, test in vars(module).items():
            if name.startswith("test_"):
                test()


def walk(seed: int) -> None:
    machine = importlib.import_module("tests.engine.test_block_manager_machine").BlockManagerMachine
    rng = random.Random(seed)
    walk = machine()
    blocks, host_blocks, caching = rng.randint(4, 14), rng.choice([0, 3, 6, 14]), rng.random() < 0.8
    walk.begin(rng.choice([1, 2, 4]), blocks, host_blocks, caching, rng.random() < 0.3)
    walk.burst(seed, 300)
    walk.teardown()


def simulate(seed: int, *, pushed: bool = False) -> None:
    importlib.import_module("tests.engine.simulation").simulate(seed, pushed=pushed)


def computing_blocks() -> None:
    module = importlib.import_module("tests.engine.test_computing_blocks")
    module.test_who_arrives_with_others_shares_what_the_first_one_computes(True)
    module.test_prompts_that_are_the_same_to_the_last_token_compute_their_last_block_each()
    module.test_who_leaves_takes_back_only_what_nobody_shares(2)
    module.test_others_hear_of_a_block_when_it_is_written_and_of_its_parents_first()
    module.test_only_who_fails_fails_and_nothing_of_it_is_cached(1)
    module.test_who_takes_over_what_another_was_computing_answers_for_it()
    module.test_a_group_that_shares_what_this_step_writes_is_not_swapped_out()


def beams() -> None:
    module = importlib.import_module("tests.engine.test_beam_groups")
    for num_blocks in (80, 20):
        module.test_beams_that_nothing_is_left_for_keep_no_blocks(num_blocks)
    module.test_beams_that_nothing_is_left_for_keep_no_host_blocks()
    module.test_beams_that_go_on_from_another_keep_their_blocks()


def guarantees() -> None:
    module = importlib.import_module("tests.engine.test_scheduler_guarantees")
    module.test_a_group_that_this_step_writes_for_is_not_swapped_out()
    module.test_nothing_is_published_before_its_step_is_committed()
    module.test_a_client_that_leaves_in_the_middle_of_a_swap_leaks_nothing(False)
    for mode in module.MODES:
        module.test_preemptions_do_not_grow_with_the_output(mode, False)


def matches() -> None:
    module = importlib.import_module("tests.engine.test_match")
    for sizes in ((), (2,)):
        module.test_a_beam_that_goes_on_from_another_is_looked_up_anew(sizes)
    for seed in range(40):
        module.test_whatever_the_caches_go_through_a_match_is_what_a_new_one_would_be(seed)
        module.test_whatever_they_go_through_so_is_a_match_of_windows(seed)


def memory() -> None:
    module = importlib.import_module("tests.engine.test_request_memory")
    module.test_batches_that_end_at_once_leave_nothing()
    module.test_who_leaves_is_gone_two_steps_later("constrained")
    module.test_who_makes_steps_raise_leaves_nothing("token")
    module.test_a_grammar_that_is_refused_takes_its_request_along()


def windows() -> None:
    module = importlib.import_module("tests.engine.test_window_groups")
    module.test_what_is_behind_the_window_is_given_back_once_it_is_computed(True)
    module.test_a_hit_ends_where_a_window_is_no_longer_cached()
    module.test_forks_share_and_copy_on_write_in_each_group()
    module.test_unpublished_blocks_behind_a_window_are_forgotten_when_they_are_given_back_early()
    module.test_what_the_device_had_no_room_for_is_found_in_host_memory_in_each_group()
    module.test_a_window_comes_from_host_memory_alone()
    module.test_layers_of_one_window_keep_no_more_than_that()
    module.test_forks_of_layers_of_one_window_go_to_host_memory_and_back()
    for sizes, keeps_all in (((5,), True), ((2, 9, 16), True), ((5,), False)):
        module.test_any_schedule_gives_the_same_tokens(sizes, keeps_all)


# The quickest first.
WALKS = {f"walk {seed}": partial(walk, seed) for seed in range(16)}
SIMULATIONS = {
    **{f"simulation {seed}": partial(simulate, seed) for seed in RARE},
    **{f"simulation {seed}, pushed": partial(simulate, seed, pushed=True) for seed in PUSHED},
    **{f"simulation {seed}": partial(simulate, seed) for seed in COMMON},
}
CHECKS: dict[str, Callable[[], None]] = {
    "examples": examples,
    "computing blocks": computing_blocks,
    "matches": matches,
    "beams": beams,
    **WALKS,
    **SIMULATIONS,
    "guarantees": guarantees,
    "memory": memory,
    "windows": windows,
}


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


def test_without_a_mistake_there_is_nothing_to_notice() -> None:
    """What the others call is tests, which run by themselves, and so do most simulations."""
    for check in WALKS.values():
        check()
    for seed in RARE:
        if seed >= CHUNKS * SEEDS:
            simulate(seed)
    for seed in PUSHED:
        if seed >= PUSHED_CHUNKS * SEEDS:
            simulate(seed, pushed=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_noticed(mutant: Mutant) -> None:
    first = NOTICED_BY.get(
        mutant.name, "windows" if mutant.module.startswith("memory.window_") else "examples"
    )
    with mutated(mutant):
        for check in (CHECKS[first], *CHECKS.values()):
            try:
                check()
            except BROKEN:
                raise
            except Exception:
                return
    pytest.fail(f"nothing noticed: {mutant.name}")
