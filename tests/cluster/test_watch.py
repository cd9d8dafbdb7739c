"""Whom the router believes: replicas of its model that hash as it does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import redis

from quire.engine.config import RegistryConfig
from quire.engine.registry.deployment import Deployment, pinned_digest, seed_digest
from quire.engine.registry.prompt_hasher import PromptHasher
from quire.engine.registry.redis import Load, Registry
from quire.loadtest.servers.fault_proxy import FaultProxy, gone, honest
from quire.loadtest.servers.redis_server import RedisServer
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.router.directory import TIMEOUT, Directory, Registered
from quire.service.router.placement import Location
from quire.service.router.registry_watch import Identity, RegistryWatch
from quire.service.router.state import RouterState

SEED = 7
OURS = Deployment(
    model="tiny", revision="r", tokenizer="t", block_size=16, dtype="float32", seed=seed_digest(SEED)
)
TOKENS = list(range(100))

pytestmark = pytest.mark.anyio


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    redis_server.client.flushall()
    return redis_server


def register(
    server: RedisServer,
    number: int,
    deployment: Deployment,
    vector: str | None = None,
    pinned: list[list[int]] | None = None,
) -> Registry:
    """With the first three blocks of TOKENS."""
    hasher = PromptHasher(deployment.block_size, SEED, pinned or [])
    config = RegistryConfig(redis_url=server.url, advertise_url=f"http://10.0.0.{number}:8000")
    registry = Registry(config, deployment, pinned or [], vector or hasher.parity(), "1")
    blocks = hasher.digests("salt", TOKENS)[:3]
    for _ in range(50):
        try:
            assert registry.publish(1, blocks, [], Load(), anew=True).status == "OK"
            return registry
        except redis.RedisError:
            registry.disconnect()
    raise AssertionError("Redis never answered in time")


class Watched:
    """A watch that runs, and whom it has told of."""

    def __init__(self, server: RedisServer | FaultProxy) -> None:
        self.told: dict[str, list[str]] = {}
        identity = Identity(OURS.model, OURS.revision, OURS.tokenizer, OURS.seed)
        self.watch = RegistryWatch(Directory(server.url), identity, SEED, self._tell)

    def _tell(self, fingerprint: str, registered: list[Registered]) -> bool:
        self.told[fingerprint] = sorted(entry.url for entry in registered)
        return True

    async def located(self) -> Location:
        """Return where TOKENS are, once the registry has answered in time, which a busy machine may not."""
        while True:
            await self.until(lambda: self.watch.state == "ok")
            location = await self.watch.locate("salt", TOKENS)
            if location.held is not None:
                return location

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        pytest.fail("it never came true")


@asynccontextmanager
async def watching(server: RedisServer) -> AsyncIterator[Watched]:
    watched = Watched(server)
    task = asyncio.create_task(watched.watch.run(poll_seconds=0.02, scan_seconds=0.05))
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await watched.watch.close()


async def test_replicas_of_one_model_may_differ_in_how_they_cache(server: RedisServer) -> None:
    """As in the middle of an upgrade: both are routed to, each by its own digests."""
    larger = msgspec.structs.replace(OURS, block_size=32)
    register(server, 1, OURS)
    register(server, 2, larger)
    async with watching(server) as watched:
        await watched.until(lambda: len(watched.told) == 2)
        assert watched.told[OURS.fingerprint] == ["http://10.0.0.1:8000"]
        assert watched.told[larger.fingerprint] == ["http://10.0.0.2:8000"]
        location = await watched.located()
        assert location.block_sizes == {OURS.fingerprint: 16, larger.fingerprint: 32}
        assert location.held == {"http://10.0.0.1:8000": 3, "http://10.0.0.2:8000": 3}


async def test_all_deployments_are_asked_at_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a request waits no longer for many than for one."""
    deployments = [msgspec.structs.replace(OURS, block_size=size) for size in (1, 16, 64)]
    for number, deployment in enumerate(deployments):
        register(server, number, deployment)
    all_under_way = asyncio.Barrier(len(deployments))

    async def lookup(self: Directory, fingerprint: str, digests: list[bytes]) -> dict[str, int]:
        await all_under_way.wait()
        return {fingerprint: len(digests)}

    monkeypatch.setattr(Directory, "lookup", lookup)
    async with watching(server) as watched:
        await watched.until(lambda: len(watched.told) == len(deployments))
        async with asyncio.timeout(30):
            location = await watched.located()
    assert location.held == {each.fingerprint: 100 // each.block_size for each in deployments}


@pytest.mark.parametrize("block_size", [0, -1, 7, 1 << 62])
async def test_a_deployment_whose_blocks_cannot_be_ends_nothing(server: RedisServer, block_size: int) -> None:
    impossible = msgspec.structs.replace(OURS, block_size=block_size)
    config = RegistryConfig(redis_url=server.url, advertise_url="http://10.0.0.1:8000")
    Registry(config, impossible, [], "v", "1").publish(1, [], [], Load(), anew=True)
    async with watching(server) as watched:
        await watched.until(lambda: watched.watch.state == "ok")
        register(server, 2, OURS)
        await watched.until(lambda: bool(watched.told))
        assert watched.told == {OURS.fingerprint: ["http://10.0.0.2:8000"]}


@pytest.mark.parametrize("name", ["model", "revision", "tokenizer", "seed"])
async def test_replicas_of_something_else_are_left_alone_and_it_is_said_why(
    server: RedisServer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    register(server, 1, msgspec.structs.replace(OURS, **{name: "another"}))
    with caplog.at_level(logging.WARNING, "quire.router"):
        async with watching(server) as watched:
            await watched.until(lambda: bool(caplog.records))
            register(server, 2, OURS)
            await watched.until(lambda: OURS.fingerprint in watched.told)
            assert watched.told == {OURS.fingerprint: ["http://10.0.0.2:8000"]}
    (record,) = [record for record in caplog.records if "10.0.0.1" in record.getMessage()]  # once
    assert f"their {name} is not the router's" in record.getMessage()


async def test_a_replica_that_hashes_in_another_way_is_refused_loudly(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    register(server, 1, OURS, vector="0" * 32)
    register(server, 2, OURS)
    with caplog.at_level(logging.ERROR, "quire.router"):
        async with watching(server) as watched:
            await watched.until(lambda: OURS.fingerprint in watched.told and bool(caplog.records))
            assert watched.told == {OURS.fingerprint: ["http://10.0.0.2:8000"]}
    assert "http://10.0.0.1:8000 hashes blocks in another way" in caplog.records[0].getMessage()


async def test_a_silent_registry_is_not_waited_for_until_it_answers_again(server: RedisServer) -> None:
    register(server, 1, OURS)
    async with watching(server) as watched:
        await watched.until(lambda: watched.watch.state == "ok" and bool(watched.told))
        server.pause()
        try:
            await watched.until(lambda: watched.watch.state == "degraded")
            assert (await watched.watch.locate("salt", TOKENS)).held is None
            assert (await watched.watch.locate("salt", TOKENS)).prefixes[OURS.fingerprint]
        finally:
            server.resume()
        await watched.until(lambda: watched.watch.state == "ok")


async def test_a_registry_that_never_answered_is_told_once_and_to_whom_has_nowhere_to_go(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = FaultProxy(server.port)
    proxy.fault = gone
    state = RouterState(ServiceConfig(served_model_names=("tiny",)), max_held_bytes=1)
    state.fleet = []  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, "quire.router"), contextlib.closing(proxy):
        async with watching(proxy) as watched:
            state.watch = watched.watch
            with pytest.raises(ApiError, match=r"^no replica is ready$"):  # it was not asked yet
                state.check_ready()
            for _ in range(4):
                assert not await watched.watch.look(scan=True)
            assert watched.watch.state == "degraded"
            with pytest.raises(ApiError, match="no replica is ready, and the registry does not answer"):
                state.check_ready()
            (told,) = (each.message for each in caplog.records)
            assert told.startswith("the registry is silent")
            proxy.fault = honest
            await watched.until(lambda: watched.watch.state == "ok")
            with pytest.raises(ApiError, match=r"^no replica is ready$"):
                state.check_ready()


async def test_a_silent_registry_is_not_asked_before_a_request_goes_on(server: RedisServer) -> None:
    """A Redis that takes connections and answers nothing: a few requests find out, and no other one asks."""
    register(server, 1, OURS)
    proxy = FaultProxy(server.port)
    answered = threading.Event()

    def never(data: bytes) -> bytes:
        answered.wait()
        return data

    watched = Watched(proxy)
    task = asyncio.create_task(watched.watch.run(poll_seconds=0.02, scan_seconds=0.05))
    try:
        await watched.until(lambda: watched.watch.state == "ok" and bool(watched.told))
        task.cancel()  # so that only requests ask
        await asyncio.gather(task, return_exceptions=True)
        proxy.fault = never
        while watched.watch.state == "ok":
            location = await watched.watch.locate("salt", TOKENS)
        questions = proxy.questions
        for _ in range(20):
            location = await watched.watch.locate("salt", TOKENS)
            assert location.held is None
            assert location.prefixes[OURS.fingerprint]
        assert proxy.questions == questions
    finally:
        answered.set()
        await watched.watch.close()
        proxy.close()


async def test_a_registry_too_slow_for_requests_is_silent(server: RedisServer) -> None:
    """A watch has no more patience than they."""
    register(server, 1, OURS)
    proxy = FaultProxy(server.port)

    def slow(data: bytes) -> bytes:
        time.sleep(2 * TIMEOUT)
        return data

    watched = Watched(proxy)
    task = asyncio.create_task(watched.watch.run(poll_seconds=0.02, scan_seconds=0.05))
    try:
        await watched.until(lambda: watched.watch.state == "ok" and bool(watched.told))
        proxy.fault = slow
        await watched.until(lambda: watched.watch.state == "degraded")
        questions = proxy.questions
        while proxy.questions < questions + 10:
            await asyncio.sleep(0.001)
            assert watched.watch.state == "degraded"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await watched.watch.close()
        proxy.close()


async def test_pinned_prefixes_are_known_to_the_router(server: RedisServer) -> None:
    """They are hashed without the tenant, so that what follows them has other digests."""
    pinned = [TOKENS[:40], [5] * 32]
    register(server, 1, msgspec.structs.replace(OURS, pinned=pinned_digest(pinned)), pinned=pinned)
    async with watching(server) as watched:
        await watched.until(lambda: bool(watched.told))
        (hasher,) = watched.watch.hashers.values()
        plain = PromptHasher(16, SEED)
        ours, theirs = hasher.digests("salt", TOKENS), hasher.digests("other", TOKENS)
        assert ours[:2] == theirs[:2]
        assert not set(ours[2:]) & set(theirs[2:])
        assert not set(ours) & set(plain.digests("salt", TOKENS))
        assert hasher.digests("salt", TOKENS[1:]) == plain.digests("salt", TOKENS[1:])
        assert (await watched.located()).held == {"http://10.0.0.1:8000": 3}
