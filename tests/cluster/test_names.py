"""Replicas found behind a DNS name, while it changes and while nobody answers."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Collection, Iterator

import httpx
import pytest

from quire.engine.config import RegistryConfig
from quire.service.router.config import RouterConfig
from quire.service.router.directory import Registered
from quire.service.router.dns_discovery import DnsDiscovery
from quire.service.router.fleet import Fleet
from tests.cluster.stub_replica import Exchange, LiveRouter, StubReplica
from tests.cluster.test_watch import OURS, Load

REPLY = b'{"answer": 1}'


class Names:
    """A resolver that says what a test says, and waits to be asked."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, int]] = set()
        self._answers: asyncio.Queue[Collection[str] | Exception] = asyncio.Queue()
        self._is_asked = asyncio.Event()

    async def resolve(self, host: str, port: int) -> Collection[str]:
        self.asked.add((host, port))
        self._is_asked.set()
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def say(self, answer: Collection[str] | Exception) -> None:
        """And wait until it was acted on, which is when the next question comes."""
        await self._is_asked.wait()
        self._is_asked.clear()
        self._answers.put_nowait(answer)
        await self._is_asked.wait()


def urls(fleet: Fleet) -> list[str]:
    return sorted(replica.url for replica in fleet)


@pytest.mark.anyio
async def test_replicas_are_those_behind_the_name(caplog: pytest.LogCaptureFixture) -> None:
    fleet, names = Fleet(RouterConfig(model="tiny", replica_dns="replicas:80"), None), Names()
    watch = DnsDiscovery("replicas", 80, fleet.resolved, names.resolve)
    task = asyncio.create_task(watch.run(0.0))
    await names.say(socket.gaierror("no such name"))
    assert urls(fleet) == []
    await names.say({"10.0.0.1", "10.0.0.2"})
    assert urls(fleet) == ["http://10.0.0.1:80", "http://10.0.0.2:80"]
    assert not any(replica.usable for replica in fleet)  # until they say so
    kept = {replica.url: replica for replica in fleet}["http://10.0.0.2:80"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "quire.router"):
        for failure in (socket.gaierror("timed out"), OSError("no network"), UnicodeError("label too long")):
            await names.say(failure)
            assert len(urls(fleet)) == 2
    assert len(caplog.records) == 1  # not again and again
    await names.say({"10.0.0.2", "fd00::3"})
    assert urls(fleet) == ["http://10.0.0.2:80", "http://[fd00::3]:80"]
    assert kept in fleet
    assert names.asked == {("replicas", 80)}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_registry_tells_of_them_and_adds_none() -> None:
    fleet = Fleet(RouterConfig(model="tiny", replica_dns="replicas:80"), None)
    fleet.resolved(["http://10.0.0.1:80"])
    load = Load(running=3, blocks=10)
    said = [Registered(f"http://10.0.0.{number}:80", "1", 1, "vector", OURS, load) for number in (1, 2)]
    fleet.register(OURS.fingerprint, said)
    (replica,) = fleet
    assert (replica.url, replica.load, replica.fingerprint) == ("http://10.0.0.1:80", 3, OURS.fingerprint)


@pytest.fixture
def replicas() -> Iterator[list[StubReplica]]:
    made = [StubReplica(lambda exchange: exchange.reply(200, REPLY)) for _ in range(2)]
    yield made
    for replica in made:
        replica.close()


def post(router: LiveRouter) -> httpx.Response:
    return httpx.post(f"{router.url}/v1/chat/completions", json={}, timeout=30)


def test_a_real_name(replicas: list[StubReplica]) -> None:
    """localhost, by whatever resolves names here; of its addresses one answers."""
    port = replicas[0].url.rpartition(":")[2]
    router = LiveRouter(replicas[:1], replica_dns=f"localhost:{port}")
    try:
        assert post(router).content == REPLY
        assert httpx.get(f"{router.url}/ready").status_code == 200
    finally:
        assert router.end() == 0


def test_what_runs_on_a_replica_that_left_the_name_goes_on(replicas: list[StubReplica]) -> None:
    leaving, staying = replicas
    more = threading.Event()

    def slowly(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.chunk(b"data: 1\n\n")
        assert more.wait(30)
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")

    leaving.answer = slowly
    router = LiveRouter(replicas)
    try:
        router.prefer(leaving)
        with httpx.stream("POST", f"{router.url}/v1/chat/completions", json={}, timeout=30) as answer:
            chunks = answer.iter_raw()
            assert next(chunks) == b"data: 1\n\n"
            assert router.server.state.fleet is not None
            router.call(lambda: router.server.state.fleet.resolved([staying.url]))
            assert [post(router).content for _ in range(3)] == [REPLY] * 3
            more.set()
            assert b"".join(chunks) == b"data: [DONE]\n\n"
        assert len(leaving.exchanges) == 1
        router.wait(lambda: [replica.url for replica in router.server.state.replicas] == [staying.url])
    finally:
        more.set()
        router.end()


class Silence:
    """A session that nobody answers."""

    def get(self, *_: object, **__: object) -> object:
        raise TimeoutError


@pytest.mark.anyio
async def test_what_runs_on_a_silent_replica_that_left_the_name_is_given_up() -> None:
    config = RouterConfig(model="tiny", replica_dns="replicas:80", probe_seconds=0)
    fleet = Fleet(config, Silence())  # type: ignore[arg-type]
    fleet.resolved(["http://10.0.0.1:80"])
    (replica,) = fleet
    replica.up = True
    given_up = asyncio.Event()
    with replica.request(give_up=given_up.set):
        fleet.resolved(["http://10.0.0.2:80"])
        assert [each.condition for each in fleet] == ["draining", "down"]
        probing = asyncio.create_task(fleet.probe())
        async with asyncio.timeout(30):
            await given_up.wait()
    fleet.resolved(["http://10.0.0.2:80"])
    assert urls(fleet) == ["http://10.0.0.2:80"]
    probing.cancel()


@pytest.mark.parametrize(
    "address", ["replicas", "replicas:", ":80", "replicas:0", "a:b", "http://a:80", "a b:80"]
)
def test_what_is_no_name_with_a_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="--replica-dns must be name:port"):
        RouterConfig(model="tiny", replica_dns=address)


@pytest.mark.parametrize(
    "url",
    [
        *("h:80", "ftp://h", "http://", "http://h:0", "http://h:99999", "http://h:a", "http://[::1"),
        *("http://h?a", "http://user:secret@h:80", "http://h/a/b", "https://h:80/"),
    ],
)
def test_what_is_no_url_of_a_replica_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--replica must be") as refused:
        RouterConfig(model="tiny", replicas=(url,))
    assert "secret" not in str(refused.value)


def test_a_replica_that_would_answer_below_a_path_is_refused() -> None:
    """Clients' paths could lead out of it."""
    message = "--advertise-url must be without a path: .*: give http://h:80$"
    with pytest.raises(ValueError, match=message):
        RegistryConfig(redis_url="redis://localhost", advertise_url="http://h:80/a/b")


def test_replicas_are_given_in_one_way() -> None:
    with pytest.raises(ValueError, match="either --replica or --replica-dns"):
        RouterConfig(model="tiny", replicas=("http://10.0.0.1:8000",), replica_dns="replicas:8000")
    with pytest.raises(ValueError, match="--replica-dns"):
        RouterConfig(model="tiny")
