"""What the journal tells, applied in any pieces, is what can be reached in the tiers and windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.hashing import BlockHasher, Prefix, Prefixes
from quire.engine.memory.prefix_cache import PrefixCache
from quire.engine.registry.journal import Journal
from quire.engine.registry.window_ends import WindowCaches, behind_window

PUBLIC = [1, 2]


def chains() -> list[Prefix]:
    """Of a few prompts that part at different blocks; two of them begin with a public block."""
    hasher = BlockHasher(2, seed=0)
    prefixes = Prefixes(hasher)
    prefixes.make_public(PUBLIC)
    every: dict[bytes, Prefix] = {}
    prompts = [[5, 5, 6, 6, 7, 7], [5, 5, 6, 6, 8, 8], [5, 5, 9, 9], [*PUBLIC, 3, 3, 4, 4], [*PUBLIC, 5, 5]]
    for salt in ("", "tenant"):
        for tokens in prompts:
            found: list[Prefix] = []
            prefixes.extend(found, hasher.block_contents(tokens), salt)
            every |= {prefix.digest: prefix for prefix in found}
    return list(every.values())


PREFIXES = chains()


class Tier:
    """A prefix cache as the journal knows it."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Prefix, bool], None]] = []
        self.held: dict[bytes, Prefix] = {}

    def prefixes(self) -> list[Prefix]:
        return list(self.held.values())

    def toggle(self, prefix: Prefix) -> None:
        findable = prefix.digest not in self.held
        if findable:
            self.held[prefix.digest] = prefix
        else:
            del self.held[prefix.digest]
        for listener in self.listeners:
            listener(prefix, findable)


def reachable(tiers: list[Tier]) -> set[bytes]:
    held = {digest for tier in tiers for digest in tier.held}

    def is_reachable(prefix: Prefix | None) -> bool:
        """A salt is no block."""
        if prefix is None:
            return True
        return (isinstance(prefix.content, str) or prefix.digest in held) and is_reachable(prefix.before)

    return {prefix.digest for prefix in PREFIXES if prefix.digest in held and is_reachable(prefix)}


toggles = st.tuples(st.integers(0, 1), st.sampled_from(PREFIXES))
operations = st.lists(st.one_of(toggles, toggles, st.integers(1, 4), st.just("restart")), max_size=80)


@given(st.lists(toggles, max_size=20), operations, st.sampled_from([3, 1000]))
def test_what_is_told_is_what_can_be_reached(
    before: list[tuple[int, Prefix]], operations: list[object], max_changes: int
) -> None:
    tiers = [Tier(), Tier()]
    for number, prefix in before:  # when nobody listened
        tiers[number].toggle(prefix)
    journal = Journal(cast(list[PrefixCache], tiers), max_changes)
    told: set[bytes] = set()

    def restart() -> None:
        nonlocal told
        found = journal.restart()
        told = set(found)
        assert len(found) == len(told)
        assert told == reachable(tiers)

    def listen(count: int) -> None:
        nonlocal told
        if journal.overflown:
            restart()
        for digest, is_reachable in journal.take(count).items():
            assert (digest in told) != is_reachable, "told what was known"
            told ^= {digest}

    restart()
    for operation in operations:
        if isinstance(operation, tuple):
            tiers[operation[0]].toggle(operation[1])
        elif isinstance(operation, int):
            listen(operation)
        else:
            restart()
    while len(journal) or journal.overflown:
        listen(2)
    assert told == reachable(tiers)
    assert (journal.dropped == 0) or max_changes == 3


@given(st.permutations(PREFIXES), st.permutations(PREFIXES))
def test_at_every_moment_a_block_is_told_of_with_all_before_it(
    added: list[Prefix], removed: list[Prefix]
) -> None:
    """So the set is closed, and how much of a prompt is in it can be found by bisection."""
    tier = Tier()
    journal = Journal([cast(PrefixCache, tier)])
    by_digest = {prefix.digest: prefix for prefix in PREFIXES}
    told: set[bytes] = set()
    for prefix in [*added, *removed]:
        tier.toggle(prefix)
    while len(journal):
        for digest, is_reachable in journal.take(1).items():
            told ^= {digest}
            for each in told:
                before = by_digest[each].before
                while before is not None:
                    assert isinstance(before.content, str) or before.digest in told
                    before = before.before
            assert (digest in told) == is_reachable
    assert told == set()


DEPTHS = (1, 2)  # blocks that are read of two window groups; the first has two tiers
window_toggles = st.tuples(st.integers(0, 4), st.sampled_from(PREFIXES))


def leading(groups: list[list[Tier]]) -> set[bytes]:
    """Blocks that any tier holds, and those before them."""
    found: set[bytes] = set()
    for prefix in (each for group in groups for tier in group for each in tier.held.values()):
        before: Prefix | None = prefix
        while before is not None:
            found.add(before.digest)
            before = before.previous
    return found


def names(tiers: list[Tier], groups: list[list[Tier]]) -> set[bytes]:
    """Of the blocks that can be reached: whether a sequence can go on behind them is in the name.

    Without tiers of layers that keep all tokens, those count that lead to what is held.
    """
    by_digest = {prefix.digest: prefix for prefix in PREFIXES}

    def goes_on_behind(digest: bytes) -> bool:
        for group, depth in zip(groups, DEPTHS, strict=True):
            held = {each for tier in group for each in tier.held}
            at: bytes | None = digest
            for _ in range(depth):
                if at is None:
                    break
                if at not in held:
                    return False
                at = by_digest[at].parent
        return True

    there = reachable(tiers) if tiers else leading(groups)
    return {each if goes_on_behind(each) else behind_window(each) for each in there}


@given(
    st.lists(window_toggles, max_size=20),
    st.lists(st.one_of(window_toggles, window_toggles, st.integers(1, 9), st.just("restart")), max_size=120),
    st.sampled_from([3, 1000]),
    st.booleans(),
)
def test_a_block_behind_a_window_that_is_gone_goes_by_another_name(
    before: list[tuple[int, Prefix]], operations: list[object], max_changes: int, keeps_all: bool
) -> None:
    tiers, groups = [Tier(), Tier()] if keeps_all else [], [[Tier(), Tier()], [Tier()]]
    every = [*tiers, *groups[0], *groups[1]]
    for number, prefix in before:
        every[number % len(every)].toggle(prefix)
    windows = [
        WindowCaches(cast(list[PrefixCache], group), depth)
        for group, depth in zip(groups, DEPTHS, strict=True)
    ]
    journal = Journal(cast(list[PrefixCache], tiers), max_changes, windows)
    told = set(journal.restart())
    assert told == names(tiers, groups)
    for operation in [*operations, 1000]:
        if isinstance(operation, tuple):
            every[operation[0] % len(every)].toggle(operation[1])
        elif operation == "restart" or journal.overflown:
            told = set(journal.restart())
            assert told == names(tiers, groups)
        else:
            for name, is_there in journal.take(cast(int, operation)).items():
                assert (name in told) != is_there, "told what was known"
                told ^= {name}
    assert told == names(tiers, groups)
