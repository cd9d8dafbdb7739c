"""Watch what the fleet's processes have and count, second by second."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from quire.loadtest.chaos.fleet import Fleet
from quire.loadtest.chaos.processes import (
    Descriptors,
    children,
    read_descriptors,
    resident_bytes,
)
from quire.loadtest.client.counters import read_samples
from quire.loadtest.client.health_probe import waited_seconds
from quire.service.router.directory import MAX_CONNECTIONS

METRICS_SECONDS = 1.0
PROCESS_SECONDS = 0.2
STALL_SECONDS = 0.1
MOST_CHILDREN = 5  # an engine, and two each that render templates and try out schemas
ROUTED = 32  # requests that the router may have had under way at once
Lateness = dict[float, float]
Process = tuple[str, int]
"""By its part in the fleet and its id: one that was restarted is another."""


@dataclass(frozen=True)
class Stalls:
    """Between two scrapes: how often a loop was more than 100 ms late, and seconds at least."""

    begin: float
    end: float
    count: int
    seconds: float


@dataclass
class Samples:
    """Times are of `time.monotonic`."""

    resident: dict[Process, list[tuple[float, int]]] = field(default_factory=dict)  # bytes
    stalls: dict[Process, list[Stalls]] = field(default_factory=dict)
    # Seconds that a thread, by its part in the fleet and its id, has waited for a core in all.
    waits: dict[Process, list[tuple[float, float]]] = field(default_factory=dict)
    preemptions: dict[Process, float] = field(default_factory=dict)  # of each life, as last seen


@dataclass(frozen=True)
class Holdings:
    """All that the processes hold when nobody asks for anything."""

    descriptors: dict[str, int]
    children: dict[str, int]  # processes
    tasks: dict[str, int]  # of the event loops
    groups: dict[str, int]  # requests that an engine holds anything of
    active_blocks: dict[str, int]  # of both tiers
    lost_blocks: dict[str, int]  # neither active nor free nor cached


def processes(fleet: Fleet) -> list[Process]:
    """Return those that run now: servers, and the replicas' engines."""
    found: list[Process] = []
    for name, server in fleet.servers.items():
        if server.exit_code is None:
            found.append((name, server.pid))
            engines = children(server.pid, "quire.engine.process")
            found += [(name.replace("replica", "engine"), pid) for pid in engines]
    return found


async def watch_processes(fleet: Fleet, samples: Samples) -> None:
    """Note their memory, and how long servers have waited for a core, until cancelled."""
    while True:
        for process in processes(fleet):
            with contextlib.suppress(OSError):  # it has just ended
                now = time.monotonic()
                samples.resident.setdefault(process, []).append((now, resident_bytes(process[1])))
                for thread in map(int, os.listdir(f"/proc/{process[1]}/task")):
                    waited = waited_seconds(thread)
                    samples.waits.setdefault((process[0], thread), []).append((now, waited))
        await asyncio.sleep(PROCESS_SECONDS)


async def watch_metrics(fleet: Fleet, samples: Samples) -> None:
    """Note what servers count, until cancelled."""
    late: dict[Process, tuple[float, Lateness]] = {}
    while True:
        for name, server in fleet.servers.items():
            with contextlib.suppress(OSError, ValueError):
                _take(samples, late, (name, server.pid), await asyncio.to_thread(read_samples, server.url))
        await asyncio.sleep(METRICS_SECONDS)


def _take(
    samples: Samples, late: dict[Process, tuple[float, Lateness]], process: Process, found: dict[str, float]
) -> None:
    now, lateness = time.monotonic(), _lateness(found)
    if process in late:
        before, known = late[process]
        new = {bound: count - known.get(bound, 0) for bound, count in lateness.items()}
        seconds = sum(bound * count for bound, count in new.items())
        samples.stalls.setdefault(process, []).append(Stalls(before, now, int(sum(new.values())), seconds))
    late[process] = (now, lateness)
    if process[0] != "router":
        samples.preemptions[process] = _sum(found, "quire_preemptions_total")


def _lateness(found: dict[str, float]) -> Lateness:
    """Return how often the loop was late, by the bound that it was later than, from that of a stall on."""
    name = 'quire_event_loop_lag_seconds_bucket{le="'
    counts = {
        float(sample.removeprefix(name).rstrip('"}')): count
        for sample, count in found.items()
        if sample.startswith(name)
    }
    bounds = sorted(bound for bound in counts if bound >= STALL_SECONDS)
    return {low: counts[high] - counts[low] for low, high in pairwise(bounds)}


def _sum(found: dict[str, float], name: str) -> float:
    return sum(value for sample, value in found.items() if sample.partition("{")[0] == name)


def look(fleet: Fleet) -> Holdings:
    """Return what is held now."""
    found = {name: read_descriptors(pid) for name, pid in processes(fleet)}
    replica_ports = {replica.port for replica in fleet.replicas}
    running = {name: server for name, server in fleet.servers.items() if server.exit_code is None}
    scraped = {name: read_samples(server.url) for name, server in running.items()}
    replicas = {name: told for name, told in scraped.items() if name != "router"}
    active = {name: _blocks(told, "active") for name, told in replicas.items()}
    there = {name: _blocks(told, "") for name, told in replicas.items()}
    capacity = {name: int(_sum(told, "quire_kv_capacity_blocks")) for name, told in replicas.items()}
    return Holdings(
        descriptors=count_descriptors(found, replica_ports, fleet.redis.port),
        children={name: each.children for name, each in found.items()},
        tasks={name: int(told["quire_event_loop_tasks"]) for name, told in scraped.items()},
        groups={name: int(told["quire_requests_in_memory"]) for name, told in replicas.items()},
        active_blocks=active,
        lost_blocks={name: capacity[name] - there[name] for name in replicas},
    )


def count_descriptors(found: Mapping[str, Descriptors], replicas: set[int], redis: int) -> dict[str, int]:
    """Count by process, but for what pools of connections may keep: to Redis, and from router to replicas.

    A pool finds out that a connection was lost when it next takes it. The router's does not shrink, for its
    questions after the replicas' health take the connections in turn. What leads to child processes is
    theirs, and they are counted.
    """
    routed = (
        {own for own, peer in found["router"].connections if peer in replicas} if "router" in found else set()
    )
    counts = {}
    for name, each in found.items():
        rest = [ports for ports in each.connections if ports[1] != redis]
        pooled = sum(own in routed or peer in routed for own, peer in rest)
        excess = max(pooled - ROUTED, 0) + max(each.lost - MAX_CONNECTIONS, 0)
        counts[name] = each.others - 2 * each.children + len(rest) - pooled + excess
    return counts


def _blocks(found: dict[str, float], state: str) -> int:
    """Count blocks of both tiers; of all states, if none is named."""
    named = [value for name, value in found.items() if name.startswith("quire_kv_blocks{") and state in name]
    return int(sum(named))


def leaked(before: Holdings, after: Holdings) -> dict[str, dict[str, int]]:
    """Return how much more there is, by what it is and by process; nothing that there is no more of."""
    more: dict[str, dict[str, int]] = {
        "descriptors": _more(before.descriptors, after.descriptors),
        "processes": _more(dict.fromkeys(after.children, MOST_CHILDREN), after.children),
        "tasks": _more(before.tasks, after.tasks),
        "groups": _more(before.groups, after.groups),
        "blocks": {
            name: active + abs(after.lost_blocks[name])
            for name, active in after.active_blocks.items()
            if active or after.lost_blocks[name]
        },
    }
    return more


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
