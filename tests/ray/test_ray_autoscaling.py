"""Ray adds a replica when requests pile up, and ends it when they no longer do; none of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from ray import serve

from tests.ray.serving import NAME, SECONDS, deploy, run, running_replicas, stream
from tests.waiting import until

CLIENTS = 6  # three on a replica, where two are wanted


@pytest.fixture(scope="module", autouse=True)
def one_replica_or_two(url: str) -> Iterator[None]:
    deploy(
        1,
        max_replicas="2",
        target_ongoing_requests="2",
        upscale_delay_s="0.5",
        downscale_delay_s="2",
        look_back_period_s="1.5",
    )
    yield
    serve.delete(NAME)


def test_replicas_come_and_go_with_the_load(url: str) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        enough = [asyncio.Event() for _ in range(CLIENTS)]

        async def ask(enough: asyncio.Event) -> list[list[str]]:
            ended = []
            while not enough.is_set():
                ended.append((await stream(session, url, max_tokens=40))[2])
            return ended

        assert running_replicas() == 1
        clients = [asyncio.create_task(ask(each)) for each in enough]
        await asyncio.to_thread(until, lambda: running_replicas() == 2, "there are two replicas", SECONDS)
        for each in enough[1:]:  # one goes on asking
            each.set()
        await asyncio.to_thread(until, lambda: running_replicas() == 1, "there is one replica", SECONDS)
        enough[0].set()
        for client in clients:
            assert all(ends == ["done"] for ends in await client)

    run(work)
