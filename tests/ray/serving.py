"""An application on a real Ray, and what its clients and the machine see of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from ray import serve

from quire.ray import app

SECONDS = 250  # generous: other tests run on the same cores
TENANTS, REPEATS = 6, 5
NAME = "quire"
REPLICA = {
    "device": "cpu",
    "num_cpus": "1",
    "max_num_seqs": "8",
    "max_ongoing_requests": "4",
    "num_gpu_blocks_override": "400",
    "swap_space": "0",
    "shutdown_timeout": "20",
}

Answer = list[dict[str, Any]]


def deploy(replicas: int, **arguments: str) -> None:
    """Return once there are so many."""
    serve.run(app({**REPLICA, "min_replicas": str(replicas), **arguments}), name=NAME)


def deployment() -> Any:
    """Return what `serve status` says of the replicas: their states, and a message."""
    return serve.status().applications[NAME].deployments["replica"]


def running_replicas() -> int:
    return int(deployment().replica_states.get("RUNNING", 0))


def run(work: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    async def in_session() -> Any:
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            return await work(session)

    return asyncio.run(in_session())


async def stream(session: aiohttp.ClientSession, url: str, **fields: object) -> tuple[str, Answer, list[str]]:
    """Return the replica, the events of a completion's stream, and how it ended: all of its last events."""
    body = {"prompt": "A block table is", "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    events, ends = [], []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        replica = answer.headers.get("X-Quire-Route", 'replica=""').split('"')[1]
        if answer.status != 200:
            return replica, [], [(await answer.json())["error"]["code"]]
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                ends.append("done")
            elif line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                events.append(event)
                if "error" in event:
                    ends.append(event["error"]["code"])
    return replica, events, ends


async def first_replica(session: aiohttp.ClientSession, url: str) -> str:
    """Return one that has begun to stream."""
    body = {"prompt": "Blocks", "max_tokens": 300, "ignore_eos": True, "stream": True}
    answer = await session.post(f"{url}/v1/completions", json=body)
    replica: str = answer.headers["X-Quire-Route"].split('"')[1]
    answer.close()
    return replica


async def repeat_prefixes(session: aiohttp.ClientSession, url: str) -> tuple[float, list[set[str]]]:
    """Return which part of the repeats found their tenant's prefix, and the replicas of each tenant."""
    prefixes = {tenant: f"{tenant}: " + "the pool of blocks is shared. " * 40 for tenant in "abcdef"}
    hits = repeats = 0
    replicas: dict[str, set[str]] = {}
    for turn in range(REPEATS + 1):
        for tenant, prefix in prefixes.items():
            replica, events, ends = await stream(
                session,
                url,
                prompt=f"{prefix} question {turn}",
                cache_salt=tenant,
                max_tokens=2,
                stream_options={"include_usage": True},
            )
            assert ends == ["done"]
            usage = events[-1]["usage"]
            replicas.setdefault(tenant, set()).add(replica)
            if turn:
                repeats += 1
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                hits += cached >= 0.8 * usage["prompt_tokens"]
    assert repeats == TENANTS * REPEATS
    return hits / repeats, list(replicas.values())


def pid_at(address: str) -> int:
    """Return the process that listens there."""
    port = f":{int(address.split(':')[1]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "0A"}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) in inodes:
                return int(descriptor.parts[2])
        except OSError:
            continue
    raise AssertionError(f"nobody listens at {address}")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in threads for child in children.read_text().split()]
