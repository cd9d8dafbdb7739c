"""A run's verdict, as a table and as JSON."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.table import Table

from quire.loadtest.chaos import checks
from quire.loadtest.chaos.checks import Check, Limits, Machine
from quire.loadtest.chaos.run import Plan, Seen
from quire.loadtest.chaos.watch import leaked
from quire.loadtest.provenance import Provenance


def judge(seen: Seen, limits: Limits) -> list[Check]:
    assert seen.before is not None and seen.after is not None
    samples, harms = seen.samples, seen.harms
    machine = Machine(seen.control, samples.waits)
    failures = seen.accidents.failures
    preemptions = sum(samples.preemptions.values())  # those that attacks cause, too
    return [
        *checks.check_leaks(leaked(seen.before, seen.after)),
        checks.check_memory(samples.resident, (seen.begin + seen.end) / 2, seen.end, limits),
        checks.check_ends(seen.outcomes),
        checks.check_failures(seen.outcomes, seen.accidents.restarts),
        checks.check_late_ends(seen.outcomes, seen.accidents.restarts, limits.end),
        checks.check_answers(seen.outcomes, seen.alone, seen.again),
        *checks.check_health(seen.health, machine, limits),
        *checks.check_stalls(samples.stalls, machine, limits),
        checks.check_hostile(harms.made, harms.stood, harms.harms),
        Check("processes that did not do as told", "0", "; ".join(failures) or "0", not failures),
        checks.check_share("preemptions per request", preemptions, len(seen.outcomes), limits.preempted),
        checks.check_left(seen.outcomes, limits.left),
    ]


def table(found: list[Check], title: str) -> Table:
    caption = "times are a server's own; raw: with what the machine had it wait; control: the machine's own"
    made = Table("", "limit", "found", "raw", "control", "", title=title, caption=caption)
    for check in found:
        verdict = "[green]ok[/green]" if check.passed else "[red]FAILED[/red]"
        shown = check.found.replace("[", "(")
        made.add_row(check.name, check.limit, shown, check.raw, check.control, verdict)
    return made


def as_json(seen: Seen, plan: Plan, limits: Limits, found: list[Check]) -> dict[str, Any]:
    accidents = seen.accidents
    return {
        "device": f"{os.cpu_count()} CPU cores",
        **asdict(Provenance.here()),
        "plan": asdict(plan),
        "limits": asdict(limits),
        "passed": all(check.passed for check in found),
        "checks": [asdict(check) for check in found],
        "answers": dict(Counter(outcome.kind for outcome in seen.outcomes)),
        "ends": dict(Counter(outcome.end for outcome in seen.outcomes)),
        "attacks": seen.harms.made,
        "restarts": [(each.how, round(each.ready - each.begin, 1)) for each in accidents.restarts],
        "redis_kills": accidents.redis_kills,
        "lies": accidents.lies,
        "compilers_killed": accidents.compilers_killed,
        "memory_mib": {
            f"{name} ({pid})": [round(size / 2**20, 1) for _, size in thinned]
            for (name, pid), samples in seen.samples.resident.items()
            if (thinned := samples[:: max(1, len(samples) // 30)])
        },
    }
