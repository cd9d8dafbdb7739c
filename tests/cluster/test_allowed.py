"""Which of the registry's replicas a router sends requests to: not to strangers."""

from __future__ import annotations

import logging
import socket

import aiohttp
import pytest

from quire.commands.settings import comma_separated
from quire.commands.table import parse
from quire.engine.registry.deployment import Deployment
from quire.engine.registry.redis import Load
from quire.service.router.allowed import AllowedReplicas, AllowedResolver
from quire.service.router.config import RouterConfig
from quire.service.router.directory import Registered
from quire.service.router.fleet import MAX_REPLICAS, Fleet
from quire.service.router.server import session_of

NO_URLS = [
    "",
    "file:///etc/passwd",
    "http://",
    "http://10.0.0.1:0",
    "http://10.0.0.1:99999",
    "http://10.0.0.1:8000?a",
    "http://10.0.0.1:8000/#a",
    "http://10.0.0.1:8000\n",
    "http://10.0.0.1\t:8000",
    "http://user:password@10.0.0.1",
    "http://10.0.0.1@evil.example",
    "http://127.1:80",
    "http://2130706433",
    "http://010.0.0.1",
    "http://[10.0.0.1]",
    "http://[::1%25eth0]",
    "http://a..b",
    f"http://{'a' * 64}.example",
    "http://h\u00f6st",
    "http://h/a b",
    "http://h/a/b",
    "http://h/",
    'http://h"',
    "http://-a",
]


@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_url_of_a_replica(url: str) -> None:
    everybody = AllowedReplicas(["0.0.0.0/0", "::/0", "*.example", "evil.example", "h", "-a"[1:]])
    assert not everybody.admits(url)


@pytest.mark.parametrize(
    ("entries", "yes", "no"),
    [
        (
            [],
            ["127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.0.9", "100.64.0.1", "[::1]", "[fd00::1]"],
            ["8.8.8.8", "172.32.0.1", "169.254.169.254", "0.0.0.0", "[2001:db8::1]", "[fe80::1]", "[::]"],
        ),
        ([], ["[::ffff:10.0.0.1]", "LOCALHOST", "some.name"], ["[::ffff:8.8.8.8]"]),
        (["10.0.0.0/24"], ["10.0.0.255"], ["10.0.1.0", "127.0.0.1"]),
        (["2001:db8::/32", "203.0.113.7"], ["[2001:db8::9]", "203.0.113.7"], ["203.0.113.8", "[fd00::1]"]),
        (["gpu.example"], ["gpu.example"], ["10.0.0.1"]),
    ],
)
def test_addresses(entries: list[str], yes: list[str], no: list[str]) -> None:
    allowed = AllowedReplicas(entries)
    assert [host for host in yes if not allowed.admits(f"http://{host}:8000")] == []
    assert [host for host in no if allowed.admits(f"https://{host}")] == []


@pytest.mark.parametrize("entry", ["", "10.0.0.1/8", "http://a", "a b", "*", "*.", "a.*", "127.1", "a:80"])
def test_what_is_no_entry_is_a_usage_error(entry: str) -> None:
    with pytest.raises(ValueError, match="--allow-replica must be"):
        RouterConfig(model="m", redis_url="redis://127.0.0.1", allow_replicas=(entry,))


def test_the_list_is_for_what_the_registry_names() -> None:
    with pytest.raises(ValueError, match="--allow-replica is for replicas that the registry names"):
        RouterConfig(model="m", replicas=("http://a",), allow_replicas=("10.0.0.0/8",))


def test_the_flag_may_repeat_and_hold_several(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parse(["route", "--allow-replica", "a, b", "--allow-replica", "10.0.0.0/8"])
    assert comma_separated(arguments.allow_replica) == ("a", "b", "10.0.0.0/8")
    monkeypatch.setenv("QUIRE_ALLOW_REPLICA", "fd00::/8,*.internal")
    assert comma_separated(parse(["route"]).allow_replica) == ("fd00::/8", "*.internal")


ADDRESSES = {"inside": "10.0.0.7", "evil.example": "203.0.113.9", "both.example": "203.0.113.9 10.0.0.7"}


@pytest.mark.anyio
async def test_a_name_is_as_good_as_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at for each connection: a name that was harmless may move."""

    async def resolve(_: object, host: str, port: int, family: int) -> list[dict[str, object]]:
        return [{"host": address} for address in ADDRESSES[host].split()]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    private = AllowedResolver(AllowedReplicas([]))
    for host, expected in (("inside", ["10.0.0.7"]), ("both.example", ["10.0.0.7"])):
        assert [each["host"] for each in await private.resolve(host, 80)] == expected
    with pytest.raises(OSError, match=r"evil\.example has no address that --allow-replica allows"):
        await private.resolve("evil.example", 80)
    named = AllowedResolver(AllowedReplicas(["*.example"]))
    assert [each["host"] for each in await named.resolve("evil.example", 80)] == ["203.0.113.9"]
    with pytest.raises(OSError):
        await named.resolve("inside", 80)


@pytest.mark.anyio
async def test_no_connection_is_made_to_a_name_elsewhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://localhost:{listener.getsockname()[1]}"
        config = RouterConfig(model="m", redis_url="redis://127.0.0.1", allow_replicas=("10.0.0.0/8",))
        async with session_of(config) as session:
            with pytest.raises(aiohttp.ClientConnectorError, match="no address that --allow-replica allows"):
                await session.get(url)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def registered(url: str) -> Registered:
    deployment = Deployment(model="m", revision="r", tokenizer="t", block_size=16, dtype="d", seed="s")
    return Registered(url, "1", 1, "p", deployment, Load())


@pytest.mark.anyio
async def test_a_stranger_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = RouterConfig(model="m", redis_url="redis://127.0.0.1")
    async with aiohttp.ClientSession() as session:
        fleet = Fleet(config, session)
        with caplog.at_level(logging.WARNING, "quire.router"):
            for _ in range(2):
                fleet.register("f", [registered(f"http://{host}:80") for host in ("8.8.8.8", "10.0.0.1")])
        assert [(replica.name, replica.up) for replica in fleet] == [
            ("10.0.0.1:80", False)
        ]  # until it answers
        (record,) = caplog.records
        assert record.getMessage() == (
            "http://8.8.8.8:80 is registered and not routed to: its host is not in a private network "
            "(--allow-replica)"
        )
        fleet.register("f", [registered(f"http://10.0.0.1:{port}") for port in range(1, 2 * MAX_REPLICAS)])
        assert len(list(fleet)) == MAX_REPLICAS
