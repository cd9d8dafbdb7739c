"""Where a prompt goes, as a function of what is cached where and who is how busy."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.registry import Load
from service.router.placement import Candidate, Location, place
from service.router.recent import REMEMBERED_SECONDS, UNPUBLISHED_SECONDS, RecentPrefixes
from service.router.replica import Replica

DIGESTS = [bytes([number]) * 16 for number in range(8)]


def candidate(number: int, load: int = 0, matched: int = 0) -> Candidate:
    replica = Replica(f"http://10.0.0.{number}:8000", up=True)
    replica.report(Load(running=load), "1", 0.0)
    return Candidate(replica, matched)


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


def test_what_was_sent_just_now_counts_until_the_registry_must_know_it() -> None:
    replica = Replica("http://10.0.0.1:8000", up=True)
    replica.fingerprint = "f"
    replica.recent.add(DIGESTS[:5], now=100.0)
    location = Location(6 * 16 + 3, {"f": DIGESTS[:6]}, {"f": 16}, {replica.url: 2})
    assert location.matched_tokens(replica, 100.0) == 5 * 16
    assert location.matched_tokens(replica, 100.0 + UNPUBLISHED_SECONDS) == 2 * 16
    silent = Location(6 * 16 + 3, {"f": DIGESTS[:6]}, {"f": 16}, None)
    assert silent.matched_tokens(replica, 100.0 + UNPUBLISHED_SECONDS) == 5 * 16
    assert silent.matched_tokens(replica, 100.0 + REMEMBERED_SECONDS) == 0
    whole = Location(2 * 16, {"f": DIGESTS[:2]}, {"f": 16}, {replica.url: 2})
    assert whole.matched_tokens(replica, 200.0) == 2 * 16 - 1  # the last token is always computed
    replica.fingerprint = "g"  # another deployment makes other digests
    assert location.matched_tokens(replica, 100.0) == 0


def test_recent_prefixes_are_bounded() -> None:
    recent = RecentPrefixes()
    for number in range(70000):
        recent.add([number.to_bytes(16, "little")], now=0.0)
    assert recent.match([(69999).to_bytes(16, "little")], -1.0) == 1
    assert recent.match([(0).to_bytes(16, "little")], -1.0) == 0


def test_load_is_what_was_said_and_what_happened_since() -> None:
    replica = Replica("http://10.0.0.1:8000", up=True)
    with replica.request(), replica.request():
        assert replica.load == 2
        replica.report(Load(running=5, waiting=3), "1", 0.0)  # two of them are ours
        assert replica.load == 8
        with replica.request():
            assert replica.load == 9
            replica.report(Load(running=5, waiting=3), "1", 1.0)  # nothing new
            assert replica.load == 9
    assert replica.load == 6
    replica.report(Load(draining=True), "2", 2.0)
    assert replica.load == 0
    assert not replica.usable
