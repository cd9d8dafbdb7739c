"""Judge a run by what was seen of it.

Times are judged as a server's own: without those in which the machine had no core for it, or was late itself.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.loadtest.chaos.clients import Outcome
from quire.loadtest.chaos.faults import Restart
from quire.loadtest.chaos.traffic import Answer
from quire.loadtest.chaos.watch import STALL_SECONDS, Stalls
from quire.loadtest.client.health_probe import Asked

QUIET_SECONDS = 0.02  # in which the control answered: the machine was not the reason
NEAR_SECONDS = 0.1
# How an answer ends whose replica is lost, with its stream begun or not: clients try that again.
LOST = frozenset({"error: replica_lost", "502: replica_lost"})
LATE = frozenset(
    {"error: not_ready", "error: replica_lost", "closed: 1001"}
)  # to a socket of one that drains
GONE = frozenset({"503: not_ready", "404: stream_not_found"})  # a stream to be picked up, of either one


@dataclass(frozen=True)
class Limits:
    """Times are seconds; those of /health and of event loops are a server's own."""

    health_p99: float = 0.05
    stalls: int = 0  # of each server's event loop
    growth: float = 0.02  # of a process's memory over the second half
    preempted: float = 0.1  # at least, of the requests of the traffic
    left: float = 0.02  # at least, of all clients
    end: float = 1.0  # from a replica's death to the last event of its streams
    settled: float = 120.0  # of a restarted process's life: its memory is judged after that


@dataclass(frozen=True)
class Check:
    """One line of the verdict. `raw` and `control` stand beside a time of a server's own."""

    name: str
    limit: str
    found: str
    passed: bool
    raw: str = ""  # with what the machine had the server wait
    control: str = ""  # of the least that a server can be, by which the machine is known


def check_leaks(more: Mapping[str, Mapping[str, int]]) -> list[Check]:
    return [
        Check(f"{what} leaked", "0", _named(counts) if counts else "0", not counts)
        for what, counts in more.items()
    ]


def check_ends(outcomes: Sequence[Outcome]) -> Check:
    """Check that each answer whose client stayed has exactly one end."""
    stayed = [outcome for outcome in outcomes if outcome.end != "left"]
    wrong = Counter(f"{each.ends} ends of {each.kind} ({each.end})" for each in stayed if each.ends != 1)
    found = _named(wrong) if wrong else f"1 each of {len(stayed)}"
    return Check("ends of a stream", "1", found, not wrong)


def check_failures(outcomes: Sequence[Outcome], restarts: Sequence[Restart]) -> Check:
    """Check that none fails but those that a restarted replica had."""
    failed = [outcome for outcome in outcomes if not outcome.is_good]
    blamed = Counter(f"{each.kind}: {each.end}" for each in failed if not _is_excused(each, restarts))
    found = _named(blamed) if blamed else f"0, and {len(failed)} of a restarted replica"
    return Check("unexplained failures", "0", found, not blamed)


def _is_excused(outcome: Outcome, restarts: Sequence[Restart]) -> bool:
    """Say whether it may fail so: with a killed replica, or late at one that ends in order."""
    overlapping = {
        restart.how for restart in restarts if outcome.began < restart.ready and outcome.ended > restart.begin
    }
    if outcome.kind == "resumed" and outcome.end in GONE:
        return bool(overlapping)
    if outcome.kind == "socket" and outcome.end in LATE and "SIGTERM" in overlapping:
        return True
    return outcome.end in LOST and "SIGKILL" in overlapping


def check_late_ends(outcomes: Sequence[Outcome], restarts: Sequence[Restart], limit: float) -> Check:
    """Check that streams of a replica that was killed hear of it at once."""
    late = [0.0]
    for outcome in outcomes:
        kills = [each.begin for each in restarts if each.how == "SIGKILL" and each.begin < outcome.ended]
        if outcome.end in LOST and kills and outcome.began < kills[-1]:
            late.append(outcome.ended - kills[-1])
    found = f"{max(late):.2f} s, of {len(late) - 1}"
    return Check("end after a replica's death", f"≤ {limit:g} s", found, max(late) <= limit)


def check_answers(
    outcomes: Sequence[Outcome], alone: Mapping[Answer, str], again: Mapping[Answer, str]
) -> Check:
    """Check that greedy answers are those that come alone, before the run and after it."""
    judged = [each for each in outcomes if each.end == "done" and each.expected is not None]
    wrong = Counter(each.kind for each in judged if each.text != alone[each.expected])  # type: ignore[index]
    wrong.update("alone, afterwards" for answer, text in alone.items() if again.get(answer) != text)
    found = _named(wrong) if wrong else f"0 of {len(judged)}"
    return Check("greedy answers unlike alone", "0", found, not wrong and bool(judged))


def check_share(name: str, count: float, of: float, least: float) -> Check:
    share = count / of if of else 0.0
    return Check(name, f"≥ {least:.0%}", f"{share:.1%} ({count:g} of {of:g})", share >= least)


def check_left(outcomes: Sequence[Outcome], least: float) -> Check:
    numbers = {each.number for each in outcomes}
    left = {each.number for each in outcomes if each.end == "left"}
    return check_share("clients that left", len(left), len(numbers), least)


def check_memory(
    resident: Mapping[tuple[str, int], Sequence[tuple[float, int]]],
    half: float,
    end: float,
    limits: Limits,
) -> Check:
    """Compare the last third of the second half with its first, of each process that lived long enough.

    Of a third, the sizes that a tenth of its samples exceeds, and that a tenth stays below; the growth is the
    lesser one of the two. A leak raises both. What a request or an attack holds for a moment raises the upper
    one, and what the allocator gives back and takes again moves either. A restarted process warms up for as
    long as it lives. It may do so up to what its twin holds that was there throughout: a leak would have
    shown there.
    """
    growth: dict[str, float] = {}
    sizes: dict[str, float] = {}  # by kind, of those that were there all the while
    young: dict[str, tuple[str, float]] = {}
    first = half - 0.9 * (end - half)  # who was there by then has been there all the while
    for (name, pid), samples in resident.items():
        born = samples[0][0]
        begin = half if born < first else max(half, born + limits.settled)
        window = np.array([size for at, size in samples if begin <= at <= end], float)
        if len(window) < 6:
            continue
        third = len(window) // 3
        before, after = (np.quantile(part, (0.1, 0.9)) for part in (window[:third], window[-third:]))
        growth[f"{name} ({pid})"] = float(min(after / before)) - 1
        kind = name.split()[0]
        if born < first:
            sizes[kind] = max(sizes.get(kind, 0.0), float(after[1]))
        else:
            young[f"{name} ({pid})"] = (kind, float(after[1]))
    for named, (kind, after) in young.items():
        if after <= sizes.get(kind, 0.0):
            del growth[named]
    grown = {name: share for name, share in growth.items() if share > limits.growth}
    worst = max(growth.values(), default=math.nan)
    found = ", ".join(f"{name}: {share:+.1%}" for name, share in grown.items())
    found = found or f"at most {worst:+.1%} of {len(growth)}"
    return Check("memory, second half", f"≤ +{limits.growth:.0%}", found, not grown and bool(growth))


class Machine:
    """Tell when the machine itself was slow: its control was, or a process waited for a core."""

    def __init__(
        self, control: Sequence[Asked], waits: Mapping[tuple[str, int], Sequence[tuple[float, float]]]
    ) -> None:
        slow = [each for each in control if each.seconds >= QUIET_SECONDS]
        self._ends = [each.begin + each.seconds for each in slow]  # in order, as they were asked in turn
        self._begins = [each.begin for each in slow]
        self._waits = {process: np.array(rows, float).reshape(-1, 2) for process, rows in waits.items()}
        self.control = control

    def was_quiet(self, begin: float, end: float) -> bool:
        """Return whether the control was quick just before, during and just after."""
        return not self._slow(begin - NEAR_SECONDS, end + NEAR_SECONDS)

    def stalled(self, begin: float, end: float) -> float:
        """Return the seconds for which the control itself stalled."""
        late = [self._ends[at] - self._begins[at] for at in self._slow(begin, end)]
        return sum(seconds for seconds in late if seconds > STALL_SECONDS)

    def _slow(self, begin: float, end: float) -> range:
        """Return which slow answers of the control overlap a time."""
        return range(bisect.bisect_left(self._ends, begin), bisect.bisect_right(self._begins, end))

    def waited(self, name: str, begin: float, end: float) -> float:
        """Return the longest that a thread of a process waited for a core, in seconds; rather too many.

        The event loop's thread also stands still while another one that has the interpreter waits.
        """
        longest = 0.0
        for (process, _), rows in self._waits.items():
            if process == name and len(rows) > 1:
                first = max(int(np.searchsorted(rows[:, 0], begin, "right")) - 1, 0)
                last = min(int(np.searchsorted(rows[:, 0], end, "left")), len(rows) - 1)
                longest = max(longest, float(rows[last, 1] - rows[first, 1]))
        return longest


def percentile(times: Iterable[float], percent: float) -> float:
    values = list(times)
    return float(np.percentile(values, percent)) if values else math.nan


def check_health(asked: Mapping[str, Sequence[Asked]], machine: Machine, limits: Limits) -> list[Check]:
    """Check each server that is never restarted."""
    checks = []
    control = _p99([one.seconds for one in machine.control])
    for name, each in asked.items():
        ill = sum(one.status != 200 for one in each)
        checks.append(Check(f"/health of {name} not 200", "0", str(ill), not ill and bool(each)))
        own = [
            max(one.seconds - one.waited, 0.0)
            for one in each
            if machine.was_quiet(one.begin, one.begin + one.seconds)
        ]
        told = f"{_p99(own)}, of {len(own)} of {len(each)}"
        # Where the machine was never quick, there is nothing to judge.
        good = not percentile(own, 99) >= limits.health_p99
        raw = _p99([one.seconds for one in each])
        limit = f"< {_ms(limits.health_p99)}"
        checks.append(Check(f"/health p99 of {name}", limit, told, good, raw, control))
    return checks


def _p99(times: Sequence[float]) -> str:
    return _ms(percentile(times, 99))


def _ms(seconds: float) -> str:
    return "none" if math.isnan(seconds) else f"{1e3 * seconds:.1f} ms"


def check_stalls(
    stalls: Mapping[tuple[str, int], Sequence[Stalls]], machine: Machine, limits: Limits
) -> list[Check]:
    """Check that no loop stalled but where it waited for a core, or the control stalled as long."""
    every, own = Counter[str](), Counter[str]()
    for (name, _), rows in stalls.items():
        for row in rows:
            every[name] += row.count
            excused = max(machine.waited(name, row.begin, row.end), machine.stalled(row.begin, row.end))
            if row.count and row.seconds > excused:
                own[name] += row.count
    late = str(sum(one.seconds > STALL_SECONDS for one in machine.control))
    return [
        Check(
            f"stalls of {name} > 100 ms",
            f"≤ {limits.stalls}",
            str(own[name]),
            own[name] <= limits.stalls,
            str(every[name]),
            late,
        )
        for name in sorted({name for name, _ in stalls})
    ]


def check_hostile(made: Mapping[str, int], stood: Mapping[str, int], harms: Mapping[str, str]) -> Check:
    found = "; ".join(f"{name}: {harm}" for name, harm in harms.items())
    return Check("attacks not stood", "0", found or f"0 of {sum(made.values())}", not harms and made == stood)


def _named(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
