"""What the chaos run judges by: each check passes what is well, and fails what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.loadtest.chaos import checks, traffic
from quire.loadtest.chaos.checks import Limits, Machine
from quire.loadtest.chaos.clients import EventStream, Outcome
from quire.loadtest.chaos.faults import Restart
from quire.loadtest.chaos.processes import Descriptors
from quire.loadtest.chaos.watch import MOST_CHILDREN, ROUTED, Holdings, Stalls, count_descriptors, leaked
from quire.loadtest.client.health_probe import Asked
from quire.service.router.directory import MAX_CONNECTIONS

GOOD = Outcome(0, "stream", 10.0, 11.0, ends=1, end="done", text="yes", expected=("text", 0, 32))
KILL = [Restart("SIGKILL", 10.5, 20.0)]
LOST = replace(GOOD, end="error: replica_lost", ended=10.7)
QUIET = Machine([Asked(begin=0.04 * at, seconds=0.001, status=200) for at in range(1000)], {})


def test_one_seed_draws_the_same_clients() -> None:
    drawn = [traffic.draw(3, number) for number in range(600)]
    assert drawn == [traffic.draw(3, number) for number in range(600)]
    assert drawn != [traffic.draw(4, number) for number in range(600)]
    assert {ask.kind for ask in drawn} == set(traffic.KINDS)
    assert 0.02 < sum(ask.leaves_after is not None for ask in drawn) / 600 < 0.1
    expected = {ask.answer for ask in drawn} - {None}
    assert expected == set(traffic.answers())


def test_an_end_too_many_or_too_few_is_found() -> None:
    left = replace(GOOD, ends=0, end="left")
    assert checks.check_ends([GOOD, left]).passed
    assert not checks.check_ends([GOOD, replace(GOOD, ends=0, end="none")]).passed
    assert not checks.check_ends([GOOD, replace(GOOD, ends=2)]).passed


def test_only_a_restarted_replica_excuses_a_failure() -> None:
    assert checks.check_failures([GOOD, LOST], KILL).passed
    assert not checks.check_failures([GOOD, LOST], []).passed
    assert not checks.check_failures([replace(LOST, began=30.0, ended=31.0)], KILL).passed
    assert not checks.check_failures([replace(LOST, end="400: invalid_grammar")], KILL).passed
    drained = [replace(KILL[0], how="SIGTERM")]
    assert not checks.check_failures([LOST], drained).passed
    late = replace(LOST, kind="socket", end="error: not_ready")
    assert checks.check_failures([late], drained).passed
    assert not checks.check_failures([late], KILL).passed
    forgotten = replace(LOST, kind="resumed", end="404: stream_not_found")
    for restarts in (KILL, drained):
        assert checks.check_failures([forgotten], restarts).passed
        assert not checks.check_failures([replace(forgotten, kind="stream")], restarts).passed


@pytest.mark.parametrize("kind", traffic.KINDS)
def test_a_killed_replica_is_named_as_the_cause(kind: str) -> None:
    """By which clients know that they may try again."""
    for end in ("error: replica_lost", "502: replica_lost"):
        assert checks.check_failures([replace(LOST, kind=kind, end=end)], KILL).passed
    for end in ("error: server_error", "error: engine_error", "closed: 1011", "503: engine_dead"):
        assert not checks.check_failures([replace(LOST, kind=kind, end=end)], KILL).passed


def test_a_death_is_heard_of_in_time() -> None:
    assert checks.check_late_ends([LOST], KILL, 1.0).passed
    assert not checks.check_late_ends([replace(LOST, ended=11.6)], KILL, 1.0).passed


def test_greedy_answers_are_compared() -> None:
    alone = {("text", 0, 32): "yes"}
    assert checks.check_answers([GOOD], alone, alone).passed
    assert not checks.check_answers([replace(GOOD, text="no")], alone, alone).passed
    assert not checks.check_answers([GOOD], alone, {("text", 0, 32): "no"}).passed
    assert not checks.check_answers([], alone, alone).passed


def memory(growth: float) -> dict[tuple[str, int], list[tuple[float, int]]]:
    """Of a process that has grown by so much over the second half of 100 s, at a steady rate."""
    return {("engine 1", 7): [(float(at), round(1e9 * (1 + growth * (at - 50) / 50))) for at in range(100)]}


@pytest.mark.parametrize(("growth", "passed"), [(0.0, True), (0.01, True), (0.04, False), (-0.2, True)])
def test_memory_that_grows_is_found(growth: float, passed: bool) -> None:
    assert checks.check_memory(memory(growth), 50.0, 100.0, Limits()).passed == passed


def test_memory_that_comes_and_goes_is_no_growth_and_hides_none() -> None:
    """Replicas give back 7 % of theirs, and take it again."""
    for growth, passed in ((0.0, True), (0.04, False)):
        (held,) = memory(growth).values()
        waves = [(at, int(size * (1 if int(at) % 12 < 5 else 0.93))) for at, size in held]
        assert checks.check_memory({("replica 1", 7): waves}, 50.0, 100.0, Limits()).passed == passed


def test_memory_of_a_moment_is_no_growth_and_hides_none() -> None:
    """An attack of the last seconds has the server hold a fifth more."""
    for growth, passed in ((0.0, True), (0.04, False)):
        (held,) = memory(growth).values()
        attacked = [(at, int(size * (1.2 if at > 92 else 1))) for at, size in held]
        assert checks.check_memory({("router", 7): attacked}, 50.0, 100.0, Limits()).passed == passed


def test_a_restarted_process_may_warm_up_and_nobody_to_judge_is_a_failure() -> None:
    young = {("engine 2", 8): [(float(at), at * 10**7) for at in range(60, 100)]}
    assert checks.check_memory(memory(0.0) | young, 50.0, 100.0, Limits()).passed
    assert not checks.check_memory(young, 50.0, 100.0, Limits()).passed


@pytest.mark.parametrize(("most", "passed"), [(0.9, True), (1.5, False)])
def test_a_restarted_process_may_grow_to_what_its_twin_holds(most: float, passed: bool) -> None:
    """`most`: of the twin's size."""
    held = memory(0.0)
    twin = next(iter(held))[0]
    size = next(iter(held.values()))[-1][1]
    young = {
        (f"{twin.split()[0]} 2", 8): [
            (float(at), int(size * most * (0.5 + at / 200))) for at in range(51, 100)
        ]
    }
    limits = Limits(settled=1.0)
    assert checks.check_memory(held | young, 50.0, 100.0, limits).passed == passed


def health(slow: float) -> dict[str, list[Asked]]:
    """A hundred answers, two of them so slow."""
    return {
        "router": [Asked(0.1 * at, slow if at in (40, 60) else 0.002, 200) for at in range(100)],
    }


def test_slow_and_ill_health_are_found() -> None:
    assert all(check.passed for check in checks.check_health(health(0.03), QUIET, Limits()))
    assert not all(check.passed for check in checks.check_health(health(0.4), QUIET, Limits()))
    ill = {"router": [*health(0.002)["router"], Asked(11.0, 0.001, 503)]}
    assert not all(check.passed for check in checks.check_health(ill, QUIET, Limits()))


BUSY = Machine([Asked(begin=0.04 * at, seconds=0.03, status=200) for at in range(1000)], {})


def test_a_slow_machine_excuses_slow_health() -> None:
    assert all(check.passed for check in checks.check_health(health(0.4), BUSY, Limits()))
    ill = {"router": [*health(0.4)["router"], Asked(11.0, 0.001, 503)]}
    assert not all(check.passed for check in checks.check_health(ill, BUSY, Limits()))


def test_a_server_without_a_core_is_excused_for_just_that_long() -> None:
    for slow, passed in ((0.4, True), (0.9, False)):
        without_core = {
            "router": [replace(one, waited=min(one.seconds, 0.39)) for one in health(slow)["router"]]
        }
        checked = checks.check_health(without_core, QUIET, Limits())
        assert all(check.passed for check in checked) == passed


def test_raw_and_control_times_stand_beside_own_ones() -> None:
    _, p99 = checks.check_health(health(0.4), BUSY, Limits())
    assert (p99.found, p99.raw, p99.control) == ("none, of 0 of 100", "400.0 ms", "30.0 ms")
    _, p99 = checks.check_health(health(0.03), QUIET, Limits())
    assert (p99.found, p99.raw, p99.control) == ("30.0 ms, of 100 of 100", "30.0 ms", "1.0 ms")
    (stalls,) = checks.check_stalls({("router", 1): [Stalls(1.0, 2.0, 2, 0.25)]}, BUSY, Limits())
    assert (stalls.found, stalls.raw, stalls.control) == ("2", "2", "0")


def test_stalls_are_found_unless_there_was_no_core() -> None:
    rows = {("router", 1): [Stalls(0.0, 1.0, 0, 0.0), Stalls(1.0, 2.0, 1, 0.25)]}
    assert not all(check.passed for check in checks.check_stalls(rows, QUIET, Limits()))
    without_core = Machine([], {("router", 1): [(0.0, 0.0), (1.0, 0.0), (2.0, 0.3)]})
    assert all(check.passed for check in checks.check_stalls(rows, without_core, Limits()))
    with_a_core = Machine([], {("router", 1): [(0.0, 0.0), (1.0, 0.0), (2.0, 0.2)]})
    assert not all(check.passed for check in checks.check_stalls(rows, with_a_core, Limits()))


def test_a_stall_is_excused_by_a_control_that_stalled_as_long_then() -> None:
    rows = {("router", 1): [Stalls(1.0, 2.0, 1, 0.25)]}
    for begin, seconds, excused in ((1.2, 0.3, True), (1.2, 0.2, False), (3.0, 0.3, False)):
        machine = Machine([Asked(0.5, 0.001, 200), Asked(begin, seconds, 200)], {})
        assert all(check.passed for check in checks.check_stalls(rows, machine, Limits())) == excused


def test_whatever_is_left_is_a_leak() -> None:
    same = Holdings(
        {"router": 9}, {"router": 2}, {"router": 3}, {"replica 1": 1}, {"replica 1": 0}, {"replica 1": 0}
    )
    assert all(check.passed for check in checks.check_leaks(leaked(same, same)))
    for more in (
        replace(same, descriptors={"router": 10}),
        replace(same, children={"router": MOST_CHILDREN + 1}),
        replace(same, tasks={"router": 4}),
        replace(same, groups={"replica 1": 2}),
        replace(same, active_blocks={"replica 1": 1}),
        replace(same, lost_blocks={"replica 1": 1}),
    ):
        assert sum(not check.passed for check in checks.check_leaks(leaked(same, more))) == 1


def test_only_what_pools_may_keep_is_no_leak() -> None:
    """8000 is the router's port, 8001 a replica's, 6379 that of Redis."""
    router = [(8000, 0), *((50_000 + at, 8001) for at in range(ROUTED)), (40_000, 6379)]
    replica = [(8001, 0), *((8001, 50_000 + at) for at in range(ROUTED))]
    named = {
        "router": Descriptors(router, MAX_CONNECTIONS, 7, 1),
        "replica 1": Descriptors(replica, 0, 15, 5),
    }
    assert count_descriptors(named, {8001}, 6379) == {"router": 6, "replica 1": 6}
    more = {
        "router": Descriptors([*router, (8000, 60_000), (60_001, 8001)], MAX_CONNECTIONS + 1, 6, 0),
        "replica 1": Descriptors([*replica, (8001, 60_001), (8001, 60_002)], 0, 9, 2),
    }
    assert count_descriptors(more, {8001}, 6379) == {"router": 10, "replica 1": 8}


def test_an_attack_that_was_not_stood_is_found() -> None:
    assert checks.check_hostile({"smuggles": 2}, {"smuggles": 2}, {}).passed
    assert not checks.check_hostile({"smuggles": 2}, {"smuggles": 1}, {"smuggles": "two lengths"}).passed


@pytest.mark.parametrize(
    ("data", "end", "text"),
    [
        (
            b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n',
            "done",
            "a",
        ),
        (b'id: 1\ndata: {"error":{"code":"replica_lost"}}\n\n', "error: replica_lost", ""),
        (b'event: x\ndata: {"type":"response.output_text.delta","delta":"b"}\n\n', "none", "b"),
        (b'data: {"type":"response.incomplete","response":{}}\n\n', "done", ""),
        (b'data: {"type":"response.failed","response":{"error":{"code":"c"}}}\n\n', "error: c", ""),
        (b": keep-alive\n\n", "none", ""),
    ],
)
def test_ends_are_read_from_a_stream_in_any_pieces(data: bytes, end: str, text: str) -> None:
    for size in (1, 7, len(data)):
        outcome = Outcome(0, "stream", 0.0)
        stream = EventStream(outcome)
        for at in range(0, len(data), size):
            stream.feed(data[at : at + size], 0.0)
        assert (outcome.end, "".join(stream.texts), outcome.ends) == (end, text, int(end != "none"))
