"""A real Ray of two replicas on the CPU, behind Ray's own proxy: nothing of a stream is lost in between."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator

import aiohttp
import pytest
from ray import serve

from quire.loadtest.servers.redis_server import RedisServer
from tests.ray.serving import NAME, Answer, deploy, first_replica, pid_at, repeat_prefixes, run, stream
from tests.waiting import until


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module", autouse=True)
def two_replicas(url: str, redis_server: RedisServer) -> Iterator[None]:
    deploy(2, redis_url=redis_server.url)
    yield
    serve.delete(NAME)


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

    async def work(session: aiohttp.ClientSession) -> None:
        hits, replicas = await repeat_prefixes(session, url)
        assert hits >= 0.95
        assert len(set.union(*replicas)) == 2  # room counts more than one request

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


def test_no_request_is_lost_while_replicas_come_and_go(url: str, redis_server: RedisServer) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        over = asyncio.Event()

        async def ask() -> list[list[str]]:
            ended = []
            while not over.is_set():
                ended.append((await stream(session, url, max_tokens=40))[2])
            return ended

        clients = [asyncio.create_task(ask()) for _ in range(6)]
        for replicas in (1, 2):
            await asyncio.to_thread(deploy, replicas, redis_url=redis_server.url)
        over.set()
        for client in clients:
            assert all(ends == ["done"] for ends in await client)

    run(work)
