"""A real Ray of two replicas on the CPU, behind Ray's own proxy: nothing of a stream is lost in between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import ray
from ray import serve

from quire.loadtest.servers.redis_server import RedisServer
from quire.loadtest.servers.server_process import free_port
from quire.ray import app
from tests.waiting import until

SECONDS = 600  # generous: other tests run on the same cores
TENANTS, REPEATS = 6, 5
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


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def arguments(redis_server: RedisServer) -> dict[str, str]:
    return {**REPLICA, "redis_url": redis_server.url}


@pytest.fixture(scope="module")
def url(arguments: dict[str, str]) -> Iterator[str]:
    """Of Ray's proxy; behind it are two replicas."""
    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deploy(arguments, 2)
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def deploy(arguments: dict[str, str], replicas: int) -> None:
    """Return once there are so many."""
    serve.run(app({**arguments, "min_replicas": str(replicas)}), name="quire")


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
        replica = answer.headers["X-Quire-Route"].split('"')[1]
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


def text_of(events: Answer) -> str:
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


def test_streams_sockets_and_all_other_endpoints_come_through(url: str) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        body = {"prompt": "A block table is", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            whole = (await answer.json())["choices"][0]["text"]
        _, events, ends = await stream(session, url, max_tokens=24)
        assert ends == ["done"]
        assert text_of(events) == whole
        async with session.ws_connect(f"{url}/v1/completions") as socket:
            await socket.send_json(body)
            said = ""
            while "choices" in (frame := await socket.receive_json()):
                said += frame["choices"][0]["text"]
        assert said == whole
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/openapi.json", "/"):
            async with session.get(url + path) as answer:
                assert answer.status == 200, path
        async with session.get(f"{url}/v1/nothing") as answer:
            assert answer.status == 404
        body["max_token"] = 3
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 400
            assert "max_token" in (await answer.json())["error"]["message"]

    run(work)


def test_a_client_that_leaves_ends_its_request(url: str) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            replica = answer.headers["X-Quire-Route"].split('"')[1]
            await answer.content.readline()
        while True:  # the test's own limit of time ends it
            async with session.get(f"http://{replica}/metrics") as metrics:
                if "vllm:num_requests_running" in (text := await metrics.text()) and not running(text):
                    return
            await asyncio.sleep(0.05)

    run(work)


def running(metrics: str) -> float:
    """Return how many requests a replica works on."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(names))


def test_a_replica_answers_nobody_who_does_not_come_by_way_of_ray(url: str) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        replica, _, _ = await stream(session, url, max_tokens=1)
        async with session.post(f"http://{replica}/v1/completions", json={"prompt": "x"}) as answer:
            assert answer.status == 403

    run(work)


def test_repeats_find_their_tenants_prefix(url: str, redis_server: RedisServer) -> None:
    """By the registry, through Ray's request router, whatever order tenants come in."""
    until(lambda: len(redis_server.client.keys("quire:*:meta:*")) == 2, "both replicas are registered")
    prefixes = {tenant: f"{tenant}: " + "the pool of blocks is shared. " * 40 for tenant in "abcdef"}

    async def work(session: aiohttp.ClientSession) -> None:
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
        assert hits >= 0.95 * repeats
        assert len(set.union(*replicas.values())) == 2  # room counts more than one request

    run(work)


def test_a_replica_that_dies_ends_its_streams_once_and_what_waits_goes_elsewhere(url: str) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        streams = [asyncio.create_task(stream(session, url, max_tokens=300)) for _ in range(14)]
        victim = await first_replica(session, url)
        os.kill(pid_at(victim), signal.SIGKILL)
        ended = await asyncio.gather(*streams)
        assert all(len(ends) == 1 for _, _, ends in ended)
        assert {ends[0] for replica, _, ends in ended if replica != victim} == {"done"}
        lost = Counter(ends[0] for replica, _, ends in ended if replica == victim)
        assert lost["replica_lost"] >= 1
        assert lost.keys() <= {"replica_lost", "done"}
        assert sum(ends == ["done"] for _, _, ends in ended) >= 10  # four at most were with it

    run(work)


async def first_replica(session: aiohttp.ClientSession, url: str) -> str:
    """Return one that has begun to stream."""
    body = {"prompt": "Blocks", "max_tokens": 300, "ignore_eos": True, "stream": True}
    answer = await session.post(f"{url}/v1/completions", json=body)
    replica: str = answer.headers["X-Quire-Route"].split('"')[1]
    answer.close()
    return replica


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


def test_no_request_is_lost_while_replicas_come_and_go(url: str, arguments: dict[str, str]) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        over = asyncio.Event()

        async def ask() -> list[list[str]]:
            ended = []
            while not over.is_set():
                ended.append((await stream(session, url, max_tokens=40))[2])
            return ended

        clients = [asyncio.create_task(ask()) for _ in range(6)]
        for replicas in (1, 3, 2):
            await asyncio.to_thread(deploy, arguments, replicas)
        over.set()
        for client in clients:
            assert all(ends == ["done"] for ends in await client)

    run(work)
