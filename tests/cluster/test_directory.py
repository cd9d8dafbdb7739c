"""What the router reads from the registry: what is there, or an error, and never another one's answer."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio

from quire.engine.config import RegistryConfig
from quire.engine.registry.deployment import Deployment, seed_digest
from quire.engine.registry.redis import FAILURES, Load, Registry
from quire.loadtest.servers.fault_proxy import FAULTS, Fault, FaultProxy, honest
from quire.loadtest.servers.redis_server import RedisServer
from quire.service.router.directory import MAX_CONNECTIONS, Directory

DEPLOYMENT = Deployment(
    model="tiny", revision="r", tokenizer="t", block_size=16, dtype="float32", seed=seed_digest(0)
)
FINGERPRINT = DEPLOYMENT.fingerprint
CHAIN = [number.to_bytes(16, "big") for number in range(600)]

pytestmark = pytest.mark.anyio


def register(url: str, number: int, blocks: list[bytes], epoch: str = "1") -> Registry:
    """Tells what replica `number` holds; a busy machine may need more than one attempt."""
    config = RegistryConfig(redis_url=url, advertise_url=f"http://10.0.0.{number}:8000")
    registry = Registry(config, DEPLOYMENT, [], "vector", epoch)
    parts = [blocks[at : at + 512] for at in range(0, len(blocks), 512)] or [[]]
    for seq, part in enumerate(parts, 1):
        for _ in range(50):
            try:
                answer = registry.publish(seq, part, [], Load(running=number), anew=seq == 1)
            except redis.RedisError:
                registry.disconnect()
                continue
            assert answer.status == "OK"
            break
        else:
            pytest.fail("Redis never answered in time")
    return registry


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    redis_server.client.flushall()
    return redis_server


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.port)
    yield proxy
    proxy.close()


async def patiently(directory: Directory, digests: list[bytes]) -> dict[str, int]:
    """A lookup waits for milliseconds only, in which a busy machine may not even connect."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await directory.lookup(FINGERPRINT, digests)
            except FAILURES:
                await asyncio.sleep(0.01)


async def test_lookup_finds_the_longest_prefix(server: RedisServer) -> None:
    rng = random.Random(1)
    lengths = {number: rng.choice([0, 1, 2, 511, 512, 513, 600]) for number in range(1, 9)}
    for number, length in lengths.items():
        register(server.url, number, CHAIN[:length] + [rng.randbytes(16) for _ in range(20)])
    directory = Directory(server.url)
    for asked in (1, 2, 3, 511, 512, 600):
        found = await patiently(directory, CHAIN[:asked])
        assert found == {
            f"http://10.0.0.{number}:8000": min(asked, length) for number, length in lengths.items()
        }
    assert set((await patiently(directory, [rng.randbytes(16)])).values()) == {0}
    assert await directory.fingerprints() == {FINGERPRINT}
    await directory.close()


async def test_a_burst_of_lookups_shares_few_connections(server: RedisServer) -> None:
    """Each of its own would have a TLS handshake, and together none would be done in time."""
    register(server.url, 1, CHAIN[:3])
    before = len(server.client.client_list())
    directory = Directory(server.url)
    answers = [directory.lookup(FINGERPRINT, CHAIN[:4]) for _ in range(64)]
    found = await asyncio.gather(*answers, return_exceptions=True)
    assert all(isinstance(each, FAILURES) or each == {"http://10.0.0.1:8000": 3} for each in found)
    assert await patiently(directory, CHAIN) == {"http://10.0.0.1:8000": 3}
    for _ in range(500):  # those that were given up take a moment to be gone
        if len(server.client.client_list()) - before <= MAX_CONNECTIONS:
            break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("each lookup has kept a connection of its own")
    await directory.close()


async def test_a_set_that_is_not_whole_says_nothing(server: RedisServer) -> None:
    registry = register(server.url, 1, CHAIN[:3])
    directory = Directory(server.url)
    registry.publish(1, CHAIN[:2], [], Load(), anew=True, whole=False)
    assert await patiently(directory, CHAIN) == {}
    assert len(await directory.registered(FINGERPRINT)) == 1
    registry.publish(2, CHAIN[2:3], [], Load())
    assert await patiently(directory, CHAIN) == {"http://10.0.0.1:8000": 3}
    await directory.close()


async def test_who_is_registered_and_for_how_long(server: RedisServer) -> None:
    directory = Directory(server.url)
    first = register(server.url, 1, CHAIN[:3])
    register(server.url, 2, [])
    found = {entry.url: entry for entry in await directory.registered(FINGERPRINT)}
    assert found.keys() == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}
    entry = found["http://10.0.0.2:8000"]
    assert (entry.deployment, entry.parity, entry.load) == (DEPLOYMENT, "vector", Load(running=2))
    first.leave()
    (left,) = await directory.registered(FINGERPRINT)
    assert left.url == "http://10.0.0.2:8000"
    server.client.zadd(f"quire:{{{FINGERPRINT}}}:replicas", {left.url: 1})  # its lease ended in 1970
    assert await directory.registered(FINGERPRINT) == []
    assert await patiently(directory, CHAIN) == {}
    await directory.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_an_answer_is_right_or_an_error(server: RedisServer, proxy: FaultProxy, fault: Fault) -> None:
    """Each asks for a length of its own: a late answer to another one's question would be noticed."""
    register(server.url, 1, CHAIN)
    directory = Directory(proxy.url)
    failures = 0

    async def ask(length: int) -> None:
        nonlocal failures
        try:
            found = await directory.lookup(FINGERPRINT, CHAIN[:length])
        except FAILURES:
            failures += 1
            return
        assert found == {"http://10.0.0.1:8000": length}

    for round_ in range(12):
        proxy.fault = fault if round_ % 3 == 1 else honest
        await asyncio.gather(*(ask(1 + round_ * 8 + number) for number in range(8)))
        if proxy.fault is fault:
            assert failures > 0
    proxy.fault = honest
    assert await patiently(directory, CHAIN[:77]) == {"http://10.0.0.1:8000": 77}
    await directory.close()


async def test_what_is_not_a_replicas_is_refused(server: RedisServer) -> None:
    """A router sends API keys to whatever URL is registered: it has to be one. Others are still found."""
    register(server.url, 1, [])
    register(server.url, 2, [])
    directory = Directory(server.url)
    key = f"quire:{{{FINGERPRINT}}}:meta:http://10.0.0.1:8000"
    for name, value in {"url": "file:///etc/passwd", "running": "many", "deployment": "{}"}.items():
        kept = server.client.hget(key, name)
        server.client.hset(key, name, value)
        (left,) = await directory.registered(FINGERPRINT)
        assert left.url == "http://10.0.0.2:8000"
        server.client.hset(key, name, kept or b"")
    assert len(await directory.registered(FINGERPRINT)) == 2
    await directory.close()


REPLICA_RULES = (
    "~quire:* +eval +hset +hget +hmget +sadd +srem +scard +zadd +zrem +zrange +zremrangebyscore "
    "+hgetall +pexpire +unlink +time +@connection"
)
ROUTER_RULES = "%R~quire:* +eval_ro +scan +zrangebyscore +hmget +sismember +time +@connection"


async def test_users_with_the_least_rights_can_do_it_and_readers_cannot_write(server: RedisServer) -> None:
    for name, rules in (("replica", REPLICA_RULES), ("router", ROUTER_RULES)):
        server.client.acl_setuser(name, enabled=True, reset=True, passwords=["+secret"])
        server.client.execute_command("ACL", "SETUSER", name, *rules.split())
    replica_url, router_url = (
        server.url.replace("127.0.0.1", f"{name}:secret@127.0.0.1") for name in ("replica", "router")
    )
    registry = register(replica_url, 1, CHAIN[:9])
    directory = Directory(router_url)
    assert await patiently(directory, CHAIN) == {"http://10.0.0.1:8000": 9}
    assert len(await directory.registered(FINGERPRINT)) == 1
    assert await directory.fingerprints() == {FINGERPRINT}
    registry.leave()
    assert server.client.keys("*") == []
    config = RegistryConfig(redis_url=router_url, advertise_url="http://10.0.0.1:8000")
    with pytest.raises(redis.RedisError):
        Registry(config, DEPLOYMENT, [], "vector", "1").publish(1, [], [], Load(), anew=True)
    await directory.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """One's own, for localhost; its key is beside it."""
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command += " -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out certificate.pem"
    subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "certificate.pem"


async def test_tls(certificate: Path) -> None:
    """A server whose certificate is not known is not told anything."""
    folder = certificate.parent
    files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(folder / "key.pem")]
    server = RedisServer(folder, *files, tls=True)
    try:
        url = f"rediss://127.0.0.1:{server.tls_port}/0"
        config = RegistryConfig(redis_url=url, advertise_url="http://10.0.0.1:8000")
        with pytest.raises(redis.RedisError, match="certificate verify failed"):
            Registry(config, DEPLOYMENT, [], "vector", "1").publish(1, [], [], Load(), anew=True)
        trusted = f"{url}?ssl_ca_certs={certificate}"
        register(trusted, 1, CHAIN[:5])
        directory = Directory(trusted)
        assert await patiently(directory, CHAIN) == {"http://10.0.0.1:8000": 5}
        await directory.close()
    finally:
        server.kill()


async def test_whatever_a_client_library_raises_is_a_failure(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as uvloop's RuntimeError of a connection that is lost while it is being made."""
    register(server.url, 1, CHAIN)
    directory = Directory(server.url)

    def lost(*_: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    with monkeypatch.context() as patch:
        patch.setattr(redis.asyncio.Connection, "send_packed_command", lost)
        for question in (
            directory.fingerprints(),
            directory.registered(FINGERPRINT),
            directory.pinned(FINGERPRINT),
            directory.lookup(FINGERPRINT, CHAIN),
        ):
            with pytest.raises(FAILURES):
                await question
    assert await patiently(directory, CHAIN) == {"http://10.0.0.1:8000": 600}
    await directory.close()


@pytest.mark.parametrize("options", ["", "?socket_timeout=1"])
async def test_no_cancellation_is_lost(server: RedisServer, options: str) -> None:
    """asyncio.wait_for loses one in Python 3.11 that comes when what it waits for is done."""
    register(server.url, 1, CHAIN)
    directory = Directory(server.url + options)
    cancelled = 0
    for turns in itertools.cycle(range(30)):
        for question in (
            directory.fingerprints(),
            directory.registered(FINGERPRINT),
            directory.pinned(FINGERPRINT),
            directory.lookup(FINGERPRINT, CHAIN),
        ):
            task = asyncio.create_task(question)
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.cancel():
                await asyncio.wait([task])
                assert task.cancelled()
                cancelled += 1
        if cancelled >= 100:
            break
    assert await patiently(directory, CHAIN) == {"http://10.0.0.1:8000": 600}
    await directory.close()


async def test_a_connection_that_is_slow_to_close_is_no_failure(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(server.url, 1, CHAIN)
    directory = Directory(server.url)
    await patiently(directory, CHAIN)

    async def wait_closed(_: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio.StreamWriter, "wait_closed", wait_closed)
    await directory.close()
