"""Where a prompt goes, as a function of what is cached where and who is how busy."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.registry.redis import Load
from quire.service.router.failures import FIRST, HALF_LIFE_SECONDS, MOST, Failures
from quire.service.router.placement import Candidate, Location, choose, place
from quire.service.router.replica import Replica
from quire.service.router.sent_prefixes import (
    ONCE_SECONDS,
    REMEMBERED_SECONDS,
    UNPUBLISHED_SECONDS,
    SentPrefixes,
)

DIGESTS = [bytes([number]) * 16 for number in range(8)]


def candidate(number: int, load: int = 0, matched: int = 0, **more: Any) -> Candidate:
    replica = Replica(f"http://10.0.0.{number}:8000", up=True)
    replica.report(Load(running=load), "1", 1, 0.0)
    return Candidate(replica, matched, **more)


def chosen(candidates: list[Candidate], prompt_tokens: int = 1000, seed: int = 0) -> Replica:
    return place(candidates, prompt_tokens, random.Random(seed), silent=False).replica


loads = st.integers(0, 300)
matches = st.integers(0, 1000)


@given(st.lists(st.tuples(loads, matches), min_size=1, max_size=6), st.integers(0, 9))
def test_nobody_is_both_busier_and_less_useful(given_: list[tuple[int, int]], seed: int) -> None:
    candidates = [candidate(number, *each) for number, each in enumerate(given_)]
    replica = chosen(candidates, seed=seed)
    (best,) = [each for each in candidates if each.replica is replica]
    for other in candidates:
        better = other.replica.load <= replica.load and other.matched_tokens >= max(best.matched_tokens, 16)
        same = other.replica.load == replica.load and other.matched_tokens == best.matched_tokens
        assert same or not better


@given(st.lists(loads, min_size=1, max_size=6), st.integers(0, 9))
def test_without_a_match_the_least_loaded_one_is_chosen(given_: list[int], seed: int) -> None:
    candidates = [candidate(number, load) for number, load in enumerate(given_)]
    assert chosen(candidates, seed=seed).load == min(given_)


def test_a_whole_match_outweighs_a_few_sequences_but_not_a_crowd() -> None:
    """Affinity that survives any load would pin a popular prefix to one replica."""
    for load, keeps in ((1, True), (8, True), (64, False), (300, False)):
        holder = candidate(1, load, matched=980)
        assert (chosen([holder, candidate(2)]) is holder.replica) == keeps
    busy = candidate(1, 70, matched=980)
    assert chosen([busy, candidate(2, 60)]) is busy.replica  # all are busy alike


def test_equals_share_the_work() -> None:
    candidates = [candidate(number) for number in range(4)]
    rng = random.Random(1)
    counts = Counter(place(candidates, 100, rng, silent=True).replica.name for _ in range(400))
    assert len(counts) == 4
    assert min(counts.values()) > 60


def test_the_decision_is_explained() -> None:
    placement = place([candidate(1, 2, matched=992)], 1000, random.Random(0), silent=False)
    assert placement.header(2) == (
        b'replica="10.0.0.1:8000", reason=prefix, predicted=992, prompt=1000, load=2, attempt=2'
    )
    assert place([candidate(1)], 1, random.Random(0), silent=True).reason == "silent"
    assert place([candidate(1, matched=15)], 1, random.Random(0), silent=False).reason == "load"


def test_what_is_cached_nowhere_goes_where_there_is_room() -> None:
    full, half = candidate(1, fill=1.0, fill_with=1.2), candidate(2, load=4, fill=0.5, fill_with=0.7)
    assert chosen([full, half]) is half.replica
    swamped = candidate(3, load=60, fill=0.0)
    assert chosen([full, swamped]) is full.replica
    holder = candidate(4, matched=980, fill=3.0, fill_with=3.0)  # what is there already takes no room
    assert chosen([full, half, holder]) is holder.replica


def test_a_prompt_leaves_where_it_is_evicted_if_another_replica_is_emptier_even_with_it() -> None:
    left = candidate(1, matched=700, lost_tokens=300, fill=1.1, fill_with=1.2)
    emptier = candidate(2, fill=0.6, fill_with=0.8)
    placement = place([left, emptier], 1000, random.Random(0), silent=False)
    assert (placement.replica, placement.reason, placement.predicted_tokens) == (emptier.replica, "moved", 0)
    as_full = candidate(3, fill=1.0, fill_with=1.1)
    assert chosen([left, as_full]) is left.replica
    frayed = candidate(4, matched=950, lost_tokens=40, fill=1.1, fill_with=1.2)
    assert chosen([frayed, emptier]) is frayed.replica
    busy = candidate(5, load=60, fill=0.0, fill_with=0.2)
    placement = place([left, busy], 1000, random.Random(0), silent=False)
    assert (placement.replica, placement.reason, placement.predicted_tokens) == (left.replica, "prefix", 700)


def replica_with(blocks: int, fingerprint: str = "f") -> Replica:
    replica = Replica("http://10.0.0.1:8000", up=True)
    replica.fingerprint = fingerprint
    replica.report(Load(blocks=blocks), "1", 1, 0.0)
    return replica


def locate(prompt_tokens: int, digests: list[bytes], held: dict[str, int] | None) -> Location:
    return Location(prompt_tokens, {"f": digests}, {"f": 16}, held)


def test_the_registry_is_believed_of_what_it_can_know() -> None:
    replica = replica_with(blocks=10)
    replica.sent_prefixes.add(DIGESTS[:5], now=100.0)
    location = locate(6 * 16 + 3, DIGESTS[:6], {replica.url: 2})
    found = location.candidate(replica, 200.0 - ONCE_SECONDS)
    assert (found.matched_tokens, found.lost_tokens) == (5 * 16, 0)  # it is being computed, for all we know
    assert (found.fill, found.fill_with) == (0.5, 0.6)
    replica.sent_prefixes.answered(DIGESTS[:5], now=101.0)
    assert location.candidate(replica, 101.0).matched_tokens == 5 * 16
    found = location.candidate(replica, 101.0 + UNPUBLISHED_SECONDS)
    assert (found.matched_tokens, found.lost_tokens) == (2 * 16, 3 * 16)
    for held in (None, {"http://10.0.0.2:8000": 6}):  # nobody says anything about this replica
        found = locate(6 * 16 + 3, DIGESTS[:6], held).candidate(replica, 101.0 + UNPUBLISHED_SECONDS)
        assert (found.matched_tokens, found.lost_tokens) == (5 * 16, 0)
    whole = locate(2 * 16, DIGESTS[:2], {replica.url: 2})
    assert whole.candidate(replica, 102.0).matched_tokens == 2 * 16 - 1  # the last token is always computed
    assert location.candidate(replica_with(10, "g"), 102.0).matched_tokens == 0  # it makes other digests
    unknown = Replica("http://10.0.0.3:8000", up=True)
    assert location.candidate(unknown, 102.0) == Candidate(unknown, fill=1.0, fill_with=1.0)


def test_what_is_sent_again_is_remembered_for_longer() -> None:
    recent = SentPrefixes()
    recent.add(DIGESTS[:6], now=0.0)
    recent.add(DIGESTS[:4], now=1.0)
    assert recent.size(1.0) == recent.match(DIGESTS, 1.0) == 6
    assert recent.size(ONCE_SECONDS) == recent.match(DIGESTS, ONCE_SECONDS) == 4
    assert recent.size(1.0 + REMEMBERED_SECONDS) == recent.match(DIGESTS, 1.0 + REMEMBERED_SECONDS) == 0


def test_what_moved_takes_no_room_where_it_was() -> None:
    first, second = replica_with(blocks=8), replica_with(blocks=80)
    second.url = "http://10.0.0.2:8000"
    first.sent_prefixes.add(DIGESTS, now=0.0)
    first.sent_prefixes.answered(DIGESTS, now=0.0)
    location = locate(8 * 16 + 1, DIGESTS, {first.url: 3, second.url: 0})
    placement = choose([first, second], location, 2.0, random.Random(0), silent=False)
    assert (placement.replica, placement.reason) == (second, "moved")
    assert (first.sent_prefixes.size(2.0), second.sent_prefixes.size(2.0)) == (0, 8)
    again = choose([first, second], location, 2.1, random.Random(0), silent=False)
    assert (again.replica, again.reason) == (second, "prefix")


def test_recent_prefixes_are_bounded() -> None:
    recent = SentPrefixes()
    for number in range(70000):
        recent.add([number.to_bytes(16, "little")], now=0.0)
    assert recent.match([(69999).to_bytes(16, "little")], 0.0) == 1
    assert recent.match([(0).to_bytes(16, "little")], 0.0) == 0
    assert recent.size(0.0) == 1 << 16


def test_load_is_what_was_said_and_what_happened_since() -> None:
    replica = Replica("http://10.0.0.1:8000", up=True)
    with replica.request(), replica.request():
        assert replica.load == 2
        replica.report(Load(running=5, waiting=3), "1", 1, 0.0)  # two of them are ours
        assert replica.load == 8
        with replica.request():
            assert replica.load == 9
            replica.report(Load(running=5, waiting=3), "1", 1, 1.0)  # nothing new
            assert replica.load == 9
    assert replica.load == 6
    replica.report(Load(draining=True), "1", 2, 2.0)
    assert replica.load == 0
    assert not replica.usable


def test_a_new_process_at_an_old_address_holds_nothing() -> None:
    replica = replica_with(blocks=8)
    replica.sent_prefixes.add(DIGESTS, now=0.0)
    replica.report(Load(blocks=8), "1", 2, 1.0)
    assert replica.fill(1.0) == 1.0
    replica.report(Load(blocks=8), "2", 1, 2.0)
    assert replica.fill(2.0) == 0.0


def test_failures_in_a_row_count_as_load_that_fades() -> None:
    """One leaves a cached prefix where it is, two do not; what failed together counts once."""
    failures = Failures()
    failures.add(0.0, 1.0)
    for sent_at in (0.0, 0.5, 0.9):
        failures.add(sent_at, 1.5)
    assert failures.load(1.0) == FIRST
    assert failures.load(1.0 + HALF_LIFE_SECONDS) == FIRST / 2
    found_there = [candidate(0, matched=900), candidate(1), candidate(2)]
    failing = found_there[0].replica
    failing.failures = failures
    failures.clear()
    now = time.monotonic()
    failures.add(now, now)
    assert chosen(found_there) is failing
    failures.add(now, now)
    assert chosen(found_there) is not failing
    for _ in range(9):
        failures.add(now, now)
    assert failures.load(now) == MOST
    failures.clear()
    assert chosen(found_there) is failing
