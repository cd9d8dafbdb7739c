"""Nothing that Redis says ends a router, or takes from it the replicas that are in order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from typing import Any

import aiohttp
import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.registry.deployment import Deployment, pinned_digest, seed_digest
from quire.engine.registry.prompt_hasher import PromptHasher
from quire.engine.registry.redis import Keys, Load, Registry, RegistryConfig
from quire.loadtest.servers.redis_server import RedisServer
from quire.service.router import fleet
from quire.service.router import registry_watch as watch
from quire.service.router.config import RouterConfig
from quire.service.router.directory import Directory, Registered
from quire.service.router.fleet import Fleet
from quire.service.router.placement import choose
from quire.service.router.registry_watch import MAX_DEPLOYMENTS, Identity, RegistryWatch
from tests.cluster.stub_replica import StubReplica

SEED = 7
OURS = Deployment(
    model="tiny", revision="r", tokenizer="t", block_size=16, dtype="float32", seed=seed_digest(SEED)
)
KEYS = Keys(OURS.fingerprint)
TOKENS = list(range(100))
GOOD, BAD = "http://10.0.0.2:8000", "http://10.0.0.1:8000"
FOREVER = 1e15

pytestmark = pytest.mark.anyio

deployments = st.builds(
    lambda changes: msgspec.json.encode({**msgspec.to_builtins(OURS), **changes}),
    st.dictionaries(
        st.sampled_from(OURS.__struct_fields__),
        st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=9), st.none(), st.lists(st.integers())),
        max_size=3,
    ),
)
numbers = st.one_of(
    st.integers(-(10**20), 10**20).map(lambda number: str(number).encode()),
    st.sampled_from([b"", b"-1", b"1_0", b" 1", b"nan", b"1e9", b"9" * 400, b"\xb2", "\u0661".encode()]),
)
values = st.one_of(
    st.binary(max_size=40),
    numbers,
    deployments,
    st.sampled_from([b"x" * 9000, b"http://8.8.8.8", b"http://[", b"http://a..b:1", b"[" * 5000, b"[[-1]]"]),
)
metas = st.dictionaries(
    st.sampled_from(
        ["url", "epoch", "seq", "parity", "deployment", "running", "waiting", "blocks", "draining", "whole"]
    ),
    values,
    max_size=4,
)
lists = st.lists(values, min_size=1, max_size=3)
scores = st.dictionaries(values, st.sampled_from([0.0, 1.0, FOREVER, float("inf")]), min_size=1, max_size=3)
things = st.one_of(
    st.tuples(st.just("string"), values),
    st.tuples(st.just("list"), lists),
    st.tuples(st.just("set"), lists),
    st.tuples(st.just("zset"), scores),
    st.tuples(st.just("hash"), st.dictionaries(values, values, min_size=1, max_size=3)),
)


def put(client: redis.Redis, key: str | bytes, thing: tuple[str, Any]) -> None:
    kind, content = thing
    client.delete(key)
    match kind:
        case "string":
            client.set(key, content)
        case "list":
            client.rpush(key, *content)
        case "set":
            client.sadd(key, *content)
        case "zset":
            client.zadd(key, content)
        case "hash":
            client.hset(key, mapping=content)


def register(server: RedisServer, url: str, deployment: Deployment = OURS) -> Registry:
    hasher = PromptHasher(deployment.block_size, SEED)
    config = RegistryConfig(redis_url=server.url, advertise_url=url)
    registry = Registry(config, deployment, [], hasher.parity(), "1")
    for _ in range(50):
        with contextlib.suppress(redis.RedisError):
            answer = registry.publish(1, hasher.digests("salt", TOKENS)[:3], [], Load(running=3), anew=True)
            assert answer.status == "OK"
            return registry
        registry.disconnect()
    raise AssertionError("Redis never answered in time")


class Reader:
    """What a router has of a registry, and what of it a request needs."""

    def __init__(self, server: RedisServer, session: aiohttp.ClientSession) -> None:
        self.fleet = Fleet(RouterConfig(model="tiny", redis_url=server.url), session)
        identity = Identity(OURS.model, OURS.revision, OURS.tokenizer, OURS.seed)
        self.directory = Directory(server.url)
        self.watch = RegistryWatch(self.directory, identity, SEED, self.fleet.register)

    async def look(self) -> None:
        """Until it answers: a busy machine may be late."""
        for _ in range(200):
            if await self.watch.look(scan=True):
                return
            await asyncio.sleep(0.01)
        pytest.fail("it never answered")

    async def place(self) -> dict[str, int] | None:
        location = await self.watch.locate("salt", TOKENS)
        replicas = list(self.fleet)
        if replicas:
            choose(replicas, location, 0.0, random.Random(1), silent=False)
        return location.held

    async def held(self) -> dict[str, int]:
        for _ in range(200):
            found = await self.place()
            if found is not None:
                return found
            await self.look()
        pytest.fail("it never answered")


@given(metas, st.dictionaries(values, st.sampled_from([1.0, FOREVER]), max_size=3), things, things)
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_entries_that_make_no_sense_spoil_no_others(
    redis_server: RedisServer, meta: dict[str, bytes], members: dict[bytes, float], thing: Any, other: Any
) -> None:
    client = redis_server.client
    client.flushall()
    register(redis_server, BAD)
    register(redis_server, GOOD)
    if meta:
        client.hset(KEYS.meta + BAD, mapping=meta)
    if members:
        client.zadd(KEYS.replicas, members)
    for number, member in enumerate(members):
        put(client, KEYS.meta.encode() + member, thing if number else other)
    put(client, f"{KEYS.blocks}{BAD}:1", thing)
    put(client, Keys("0" * 32).replicas, other)
    put(client, Keys("no fingerprint").replicas, thing)
    async with aiohttp.ClientSession() as session:
        reader = Reader(redis_server, session)
        await reader.look()
        replicas = {replica.url: replica for replica in reader.fleet}
        assert replicas.keys() <= {GOOD, BAD}
        assert replicas[GOOD].load == 3
        held = await reader.held()
        assert held[GOOD] == 3
        assert all(0 <= blocks <= 6 for blocks in held.values())
        await reader.watch.close()


@given(st.sampled_from([KEYS.replicas, KEYS.meta + GOOD, KEYS.pinned, f"{KEYS.blocks}{GOOD}:1"]), things)
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_no_key_of_any_type_ends_a_router(redis_server: RedisServer, key: str, thing: Any) -> None:
    """Neither one that starts, nor one that has read what was there before."""
    client = redis_server.client
    client.flushall()
    register(redis_server, GOOD)
    async with aiohttp.ClientSession() as session:
        reader, late = Reader(redis_server, session), Reader(redis_server, session)
        await reader.look()
        put(client, key, thing)
        for each in (reader, late):
            for _ in range(2):
                await each.watch.look(scan=True)
                await each.place()
            assert {replica.url for replica in each.fleet} <= {GOOD}
        client.flushall()
        register(redis_server, GOOD)
        for each in (reader, late):  # and it is well again
            await each.look()
            assert (await each.held())[GOOD] == 3
            await each.watch.close()


async def test_deployments_that_nobody_is_in_are_forgotten_and_few_are_kept(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hashes every prompt in its own way, and anybody may make them up."""
    redis_server.client.flushall()
    for number in range(3 * MAX_DEPLOYMENTS):
        register(redis_server, GOOD, msgspec.structs.replace(OURS, dtype=str(number)))
    async with aiohttp.ClientSession() as session:
        reader = Reader(redis_server, session)
        await reader.look()
        assert len(reader.watch.hashers) == MAX_DEPLOYMENTS
        redis_server.client.flushall()
        await reader.look()
        assert len(reader.watch.hashers) == MAX_DEPLOYMENTS  # it may have been emptied just now
        monkeypatch.setattr(watch, "DEPLOYMENT_SECONDS", 0.0)
        await reader.look()
        assert not reader.watch.hashers
        await reader.watch.close()


async def test_deployments_of_nobody_take_no_place_from_one_that_is_there(redis_server: RedisServer) -> None:
    redis_server.client.flushall()
    made_up = [msgspec.structs.replace(OURS, dtype=str(number)) for number in range(3 * MAX_DEPLOYMENTS)]
    for deployment in made_up[MAX_DEPLOYMENTS:]:
        register(redis_server, BAD, deployment)
    async with aiohttp.ClientSession() as session:
        reader = Reader(redis_server, session)
        await reader.look()
        assert len(reader.watch.hashers) == MAX_DEPLOYMENTS
        register(redis_server, GOOD)
        await reader.look()
        assert OURS.fingerprint not in reader.watch.hashers
        (good,) = (replica for replica in reader.fleet if replica.url == GOOD)  # so that it is asked
        good.up = True
        await reader.look()
        assert OURS.fingerprint in reader.watch.hashers
        assert len(reader.watch.hashers) == MAX_DEPLOYMENTS
        assert (await reader.held())[GOOD] == 3
        good.up = False
        (bad,) = (replica for replica in reader.fleet if replica.url == BAD)
        bad.up = True
        for deployment in made_up[:MAX_DEPLOYMENTS]:
            register(redis_server, BAD, deployment)
        await reader.look()
        assert OURS.fingerprint in reader.watch.hashers  # which it has proved to be
        await reader.watch.close()


async def test_addresses_where_nobody_is_keep_no_replica_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there are more of them than a router remembers: one that was ready stays, others make room."""
    monkeypatch.setattr(fleet, "MAX_REPLICAS", 4)
    closed = [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]
    urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in closed]
    for each in closed:
        each.close()
    true, early = [StubReplica(lambda exchange: None) for _ in range(2)]
    said = [Registered(url, "1", 1, "p", OURS, Load()) for url in (early.url, *urls, true.url)]
    config = RouterConfig(model="tiny", redis_url="redis://127.0.0.1", probe_seconds=0.01)
    async with aiohttp.ClientSession() as session:
        router = Fleet(config, session)
        probing = asyncio.create_task(router.probe())

        async def wait_ready(*names: str) -> None:
            for _ in range(3000):
                if {replica.name for replica in router if replica.up} == {*names}:
                    return
                router.register("f", said)
                assert len(list(router)) <= 4
                await asyncio.sleep(0.01)
            pytest.fail("it never came true")

        router.register("f", said[:1])
        await wait_ready(early.name, true.name)
        early.close()
        await wait_ready(true.name)
        assert early.url in [replica.url for replica in router]
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    true.close()


@pytest.mark.parametrize("pinned", ["[[-1]]", "[[4294967296]]", '{"a": 1}', '["a"]', "[" * 9999, '[["x"]]'])
async def test_pinned_prefixes_that_are_none(redis_server: RedisServer, pinned: str) -> None:
    redis_server.client.flushall()
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        described = pinned_digest(msgspec.json.decode(pinned))
        deployment = msgspec.structs.replace(OURS, pinned=described)
        register(redis_server, BAD, deployment)
        redis_server.client.hset(Keys(deployment.fingerprint).pinned, "tokens", pinned)
    register(redis_server, GOOD)
    async with aiohttp.ClientSession() as session:
        reader = Reader(redis_server, session)
        await reader.look()
        assert {replica.url for replica in reader.fleet} == {GOOD}
        await reader.watch.close()
