"""What the journal tells, applied in any pieces, is what the tiers hold."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from engine.journal import Journal

DIGESTS = [bytes([number]) * 16 for number in range(12)]


class Tier:
    """A prefix cache as the journal knows it."""

    def __init__(self) -> None:
        self.on_change: Callable[[bytes, bool], None] | None = None
        self.held: dict[bytes, None] = {}

    def digests(self) -> list[bytes]:
        return list(self.held)

    def toggle(self, digest: bytes) -> None:
        findable = digest not in self.held
        if findable:
            self.held[digest] = None
        else:
            del self.held[digest]
        assert self.on_change is not None
        self.on_change(digest, findable)


toggles = st.tuples(st.integers(0, 1), st.sampled_from(DIGESTS))
operations = st.lists(st.one_of(toggles, st.integers(1, 4), st.just("restart")), max_size=80)


@given(operations, st.sampled_from([3, 1000]))
def test_what_is_told_is_what_is_held(operations: list[object], max_changes: int) -> None:
    tiers = [Tier(), Tier()]
    tiers[0].held[DIGESTS[0]] = None  # there before anybody listened
    journal = Journal(tiers, max_changes)  # type: ignore[arg-type]
    told = set(journal.restart())

    def listen(count: int) -> None:
        nonlocal told
        if journal.overflown:
            told = set(journal.restart())
        net = journal.take(count)
        assert len(net) <= count
        for digest, findable in net.items():
            assert (digest in told) != findable, "told what was known"
        told ^= set(net)

    for operation in operations:
        if isinstance(operation, tuple):
            tiers[operation[0]].toggle(operation[1])
        elif isinstance(operation, int):
            listen(operation)
        else:
            told = set(journal.restart())
    while len(journal) or journal.overflown:
        listen(2)
    assert told == tiers[0].held.keys() | tiers[1].held.keys()
    assert (journal.dropped == 0) or max_changes == 3


def test_changes_are_told_in_their_order() -> None:
    """A parent is told of before its child, and a child's end before its parent's."""
    tier = Tier()
    journal = Journal([tier])  # type: ignore[list-item]
    for digest in [*DIGESTS, *reversed(DIGESTS)]:
        tier.toggle(digest)
    held: list[bytes] = []
    while len(journal):
        for digest, findable in journal.take(1).items():
            if findable:
                held.append(digest)
            else:
                assert held.pop() == digest
        assert held == DIGESTS[: len(held)]
    assert held == []
