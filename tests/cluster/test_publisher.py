"""What a real Redis holds of an engine, while the engine works and while Redis fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import xxhash

from quire.engine.config import RegistryConfig
from quire.engine.core import EngineCore
from quire.engine.hashing import Prefix
from quire.engine.messages import Request, SamplingParams
from quire.engine.registry.deployment import Deployment, hash_seed, seed_digest, tokenizer_digest
from quire.engine.registry.journal import journal_of
from quire.engine.registry.prompt_hasher import PromptHasher
from quire.engine.registry.publisher import Publisher
from quire.engine.registry.redis import LOOKUP, Answer, Keys, Registry
from quire.engine.registry.window_ends import behind_window
from quire.engine.sequences.sequence import SequenceGroup
from quire.loadtest.servers.fault_proxy import FAULTS, Fault, FaultProxy, gone, honest
from quire.loadtest.servers.redis_server import RedisServer
from tests.engine.simulation import make_core, random_request

DEPLOYMENT = Deployment(
    model="tiny", revision="r", tokenizer="t", block_size=4, dtype="float32", seed=seed_digest(0)
)
KEYS = Keys(DEPLOYMENT.fingerprint)
URL = "http://10.0.0.1:8000"
META = f"{KEYS.meta}{URL}"


class Replica:
    """An engine with a random workload, and its publisher, driven by hand."""

    def __init__(
        self,
        server: RedisServer,
        seed: int = 0,
        epoch: str = "1",
        max_changes: int = 1000,
        url: str | None = None,
        windows: tuple[int, ...] = (),
        keeps_all: bool = True,
    ) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        num_blocks, num_host_blocks = (84, 40) if len(windows) > 1 else (24, 12)
        self.core: EngineCore = make_core(
            num_blocks,
            4,
            4,
            16,
            num_host_blocks=num_host_blocks,
            mode="swap",
            windows=windows,
            keeps_all=keeps_all,
        )
        blocks = self.core.scheduler.blocks
        self.tiers = [blocks.cache, blocks.host.cache]
        self.server = server
        self.epoch = epoch
        config = RegistryConfig(redis_url=url or server.url, advertise_url=URL)
        self.registry = Registry(config, DEPLOYMENT, [], "vector", epoch, has_windows=bool(windows))
        self.journal = journal_of(blocks, max_changes)
        self.publisher = Publisher(self.registry, self.journal, config.lease, 36, lambda: self.now)
        self.requests: list[Request] = []

    def work(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < 0.4:
                request = random_request(self.rng, len(self.requests), longest=20, widest=3)
                self.core.add(request)
                self.requests.append(request)
            self.core.step()
            self.publisher.observe(self.core.stats)

    @property
    def findable(self) -> set[bytes]:
        """What a request can reach: with all that is before it."""
        every = {prefix.digest: prefix for tier in self.tiers for prefix in tier.prefixes()}

        def reachable(prefix: Prefix | None) -> bool:
            while prefix is not None:
                if not isinstance(prefix.content, str) and prefix.digest not in every:
                    return False
                prefix = prefix.before
            return True

        return {digest for digest, prefix in every.items() if reachable(prefix)}

    @property
    def published(self) -> set[bytes]:
        members = self.server.client.smembers(f"{KEYS.blocks}{URL}:{self.epoch}")
        assert isinstance(members, set)
        return members

    def tick(self) -> None:
        """When every pause is over and a heartbeat due."""
        self.now += 6.0
        self.publisher.tick()

    def settle(self) -> None:
        """Tick until everything is told; what a busy machine made too slow is tried again."""
        until(lambda: self.tick() is None and self.published == self.findable)
        until(lambda: self.tick() is None and self.publisher.state == "ok")


WINDOWS = (5, 1000)


class WindowReplica(Replica):
    """The same of a model whose second cache group keeps few tokens, and whose third keeps all.

    keeps_all: else it has the second one only.
    """

    def __init__(self, server: RedisServer, seed: int = 0, *, keeps_all: bool = True, **given: Any) -> None:
        windows = WINDOWS if keeps_all else WINDOWS[:1]
        super().__init__(server, seed, windows=windows, keeps_all=keeps_all, **given)

    def finish(self) -> None:
        """Step until nothing is left to do, and publish."""
        while self.core.has_work:
            self.core.step()
        until(lambda: self.tick() is None and not len(self.journal))
        until(lambda: self.tick() is None and self.publisher.state == "ok")

    def found(self, request: Request) -> int:
        """Blocks of its prompt that the engine would not compute."""
        blocks = self.core.scheduler.blocks
        group = SequenceGroup(request, np.array(request.prompt, np.int32), 0, ())
        found = blocks.match(group.sequences[0])
        blocks.end(group.sequences[0])
        return len(found)

    @property
    def digests(self) -> set[bytes]:
        """Those of all requests' prompts."""
        hasher = PromptHasher(4, 0)
        return {digest for each in self.requests for digest in hasher.digests(each.cache_salt, each.prompt)}

    def predicted(self, request: Request) -> int:
        """The same, as a router reads it."""
        most = (len(request.prompt) - 1) // 4  # the last token is computed in any case
        digests = PromptHasher(4, 0).digests(request.cache_salt, request.prompt)[:most]
        keys = (KEYS.replicas, KEYS.meta, KEYS.blocks)
        found: Any = self.server.client.eval_ro(LOOKUP, 1, *keys, b"".join(digests))
        ((url, blocks),) = found
        assert url == URL.encode()
        return int(blocks)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    redis_server.client.flushall()
    return redis_server


@pytest.mark.parametrize("seed", range(4))
def test_registry_holds_what_the_engine_finds(server: RedisServer, seed: int) -> None:
    replica = Replica(server, seed, max_changes=1000 if seed else 8)
    largest = 0
    for _ in range(40):
        replica.work(replica.rng.randint(1, 6))
        if replica.rng.random() < 0.7:
            replica.settle()
            largest = max(largest, len(replica.published))
    assert largest > 10
    assert (replica.publisher.report().dropped > 0) == (seed == 0)
    assert replica.core.stats.block_evictions > 20
    assert replica.core.stats.swap_out_blocks > 0


@pytest.mark.parametrize("keeps_all", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_a_router_reads_how_far_an_engine_with_windows_finds_a_prompt(
    server: RedisServer, seed: int, keeps_all: bool
) -> None:
    replica = WindowReplica(server, seed, keeps_all=keeps_all, max_changes=8 if seed else 1000)
    lengths: set[int] = set()
    for _ in range(12):
        replica.work(20)
        replica.finish()
        for request in replica.requests:
            assert replica.predicted(request) == replica.found(request)
            lengths.add(replica.found(request))
    assert len(lengths) > 3
    published = replica.published
    assert not published & {behind_window(digest) for digest in published}, "a block has two names"
    behind = {behind_window(digest) for digest in published}
    assert behind & (replica.findable if keeps_all else replica.digests), "all windows are there"


def test_a_router_hears_that_a_window_alone_was_evicted(server: RedisServer) -> None:
    replica = WindowReplica(server)
    request = Request(0, list(range(40)), SamplingParams(max_tokens=1))
    replica.core.add(request)
    replica.finish()
    assert replica.predicted(request) == replica.found(request) == 9
    blocks = replica.core.scheduler.blocks
    assert blocks.windows is not None
    window = blocks.windows.caches[0]
    digests = PromptHasher(4, 0).digests("", request.prompt)
    held = {window.prefix(block).digest: block for block in range(84) if block in window}
    for lost, left in ((8, 8), (5, 8), (7, 7), (6, 5), (4, 4), (0, 4), (3, 3), (2, 2), (1, 0)):
        block = held[digests[lost]]
        blocks.pool.discard(block)
        window.forget(block)
        replica.finish()
        assert replica.predicted(request) == replica.found(request) == left
    assert {behind_window(digest) for digest in digests[:9]} <= replica.published, "all others keep them"


def test_a_router_hears_how_far_a_prompt_leads_whose_beginning_is_gone(server: RedisServer) -> None:
    replica = WindowReplica(server, keeps_all=False)
    request = Request(0, list(range(40)), SamplingParams(max_tokens=1))
    shorter = Request(1, list(range(20)), SamplingParams(max_tokens=1))
    replica.core.add(request)
    replica.finish()
    pool = replica.core.scheduler.blocks.pool
    left = []
    while pool.num_cached:
        pool.evict()  # of tokens that were given back first
        replica.finish()
        for each in (request, shorter):
            assert replica.predicted(each) == replica.found(each)
        left.append((replica.found(request), replica.found(shorter)))
    assert (9, 0) in left, "what is behind the evicted blocks is found, but for prompts that end there"
    assert left[-1] == (0, 0) and not replica.published


def test_registry_is_emptied_and_restarted_in_between(server: RedisServer) -> None:
    """FLUSHALL, an evicted key, a restart: the next word of the replica finds out."""
    replica = Replica(server, 5)

    def lose_blocks() -> None:
        server.client.delete(f"{KEYS.blocks}{URL}:1")

    def lose_one_block() -> None:
        server.client.spop(f"{KEYS.blocks}{URL}:1")

    def restart() -> None:
        server.kill()
        server.start()

    for harm in (server.client.flushall, lose_blocks, lose_one_block, restart):
        replica.work(40)
        replica.settle()
        assert len(replica.published) > 5
        harm()
        replica.work(3)
        replica.settle()


def test_a_repeated_publication_does_no_harm(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis did what it was asked, and the answer was lost."""
    replica = Replica(server, 6)
    replica.work(40)
    replica.settle()
    replica.work(10)
    publish = replica.registry.publish
    lost = 0

    def publish_and_lose(*arguments: Any, **options: Any) -> Answer:
        nonlocal lost
        answer = publish(*arguments, **options)
        if lost < 3:
            lost += 1
            raise redis.TimeoutError("the answer came too late")
        return answer

    monkeypatch.setattr(replica.registry, "publish", publish_and_lose)
    replica.tick()
    assert replica.publisher.state == "degraded"
    until(lambda: replica.tick() is None and lost == 3)
    replica.settle()
    assert int(server.client.hget(META, "seq") or 0) > 1


def test_nobody_looks_at_what_is_being_published_anew(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it would look as if the other half had been evicted."""
    monkeypatch.setattr("quire.engine.registry.publisher.BATCH", 3)
    replica = Replica(server, 5)
    replica.work(60)
    replica.settle()
    assert len(replica.findable) > 9
    server.client.flushall()
    publish, seen = replica.registry.publish, []

    def look(*arguments: Any, **options: Any) -> Answer:
        answer = publish(*arguments, **options)
        seen.append((server.client.hget(META, "whole"), replica.published == replica.findable))
        return answer

    monkeypatch.setattr(replica.registry, "publish", look)
    replica.settle()
    told = [(whole == b"1", all_there) for whole, all_there in seen if whole is not None]
    assert told.count((False, False)) >= 3
    assert all(whole == all_there for whole, all_there in told)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_whatever_redis_says_it_is_told_all_once_it_is_itself_again(
    server: RedisServer, fault: Fault
) -> None:
    proxy = FaultProxy(server.port)
    try:
        replica = Replica(server, 7, url=proxy.url)
        for _ in range(4):
            replica.work(20)
            replica.settle()
            proxy.fault = fault
            replica.work(20)
            until(lambda: replica.tick() is None and replica.publisher.state == "degraded")
            replica.work(20)
            replica.tick()
            proxy.fault = honest
        replica.settle()
    finally:
        proxy.close()


def test_each_outage_is_told_once_and_one_at_the_start_too(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = FaultProxy(server.port)
    try:
        replica = Replica(server, url=proxy.url)
        for _ in range(2):
            proxy.fault = gone
            for _ in range(3):
                replica.tick()
            assert replica.publisher.state == "degraded"
            (told,) = (each.message for each in caplog.records if each.levelname == "WARNING")
            assert told.startswith("the registry fails, and is tried again every 2 s: ")
            proxy.fault = honest
            replica.settle()
            caplog.clear()
    finally:
        proxy.close()


def test_the_engine_waits_for_no_publication(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is under way all the time that the engine works: it takes the steps that it takes on its own."""

    def steps(replica: Replica) -> list[tuple[int, int]]:
        """The tokens of each, until every request has ended."""
        found = []
        for number in range(8):
            replica.core.add(random_request(replica.rng, number, longest=20, widest=3))
        while replica.core.scheduler.has_work or not found:
            replica.core.step()
            replica.publisher.observe(replica.core.stats)
            replica.publisher.report()
            found.append((replica.core.stats.prefill_tokens, replica.core.stats.decode_tokens))
        return found

    alone, published = Replica(server, 8), Replica(server, 8)
    begun, done = threading.Event(), threading.Event()
    publish = published.registry.publish

    def hold(*arguments: Any, **options: Any) -> Answer:
        begun.set()
        assert done.wait(60)
        return publish(*arguments, **options)

    monkeypatch.setattr(published.registry, "publish", hold)
    published.publisher.start()
    assert begun.wait(60)
    try:
        assert steps(published) == steps(alone)
        published.publisher.drain()
    finally:
        done.set()
        published.publisher.stop()


def test_an_answer_without_end_is_not_read_to_its_end(server: RedisServer) -> None:
    proxy = FaultProxy(server.port)
    try:
        replica = Replica(server, url=proxy.url)
        proxy.fault = lambda data: b"$1000000\r\n" + 1000000 * b"x"
        with pytest.raises(redis.ConnectionError, match="more than 65536 bytes"):
            replica.registry.leave()
    finally:
        proxy.close()


def test_an_engine_ends_though_a_publication_does_not(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.registry.publisher.STOP_SECONDS", 0.0)
    replica = Replica(server)
    begun, stopped, ended = threading.Event(), threading.Event(), threading.Event()

    def hold(*arguments: Any, **options: Any) -> Answer:
        begun.set()
        stopped.wait(5)
        ended.set()
        raise redis.TimeoutError

    monkeypatch.setattr(replica.registry, "publish", hold)
    replica.publisher.start()
    assert begun.wait(60)
    replica.publisher.stop()
    assert not ended.is_set()
    stopped.set()


def test_a_newer_process_takes_over(server: RedisServer) -> None:
    """The set of the process before goes, and that one can do no more harm."""
    old = Replica(server, 1, epoch="1")
    old.work(40)
    old.settle()
    new = Replica(server, 2, epoch="2")
    new.work(40)
    new.settle()
    assert server.client.keys(f"{KEYS.blocks}*") == [f"{KEYS.blocks}{URL}:2".encode()]
    old.work(40)
    old.tick()
    assert old.publisher.state == "degraded"
    old.registry.leave()
    assert new.published == new.findable
    new.registry.leave()
    assert server.client.keys("*") == []
    old.settle()  # nobody else is there any more


def test_what_is_published_ends_with_the_lease(server: RedisServer) -> None:
    replica = Replica(server, 3)
    replica.work(30)
    replica.settle()
    keys = server.client.keys("*")
    assert len(keys) == 3
    assert all(key.startswith(f"quire:{{{DEPLOYMENT.fingerprint}}}:".encode()) for key in keys)
    assert all(0 < server.client.pttl(key) <= 15000 for key in keys)
    meta = server.client.hgetall(META)
    assert meta[b"url"] == URL.encode()
    assert meta[b"parity"] == b"vector"
    assert meta[b"draining"] == b"0"
    assert int(meta[b"running"]) == replica.core.stats.sequences_running
    assert int(meta[b"blocks"]) == 24 + 12
    replica.publisher.drain()
    until(lambda: replica.tick() is None and server.client.hget(META, "draining") == b"1")


def test_hashes_are_what_they_are_said_to_be() -> None:
    """xxh3-128 over (digest before, little-endian token ids), from the salt on."""
    seed = hash_seed("a secret")
    tokens = [at * 2654435761 % 131071 for at in range(3 * 16)]
    digest = xxhash.xxh3_128_digest(b"\0parity", seed)
    for first in range(0, 48, 16):
        ids = b"".join(token.to_bytes(4, "little") for token in tokens[first : first + 16])
        digest = xxhash.xxh3_128_digest(digest + ids, seed)
    assert PromptHasher(16, seed).parity() == digest.hex()
    assert PromptHasher(16, 0).parity() == "ce3aab279fbeb09cba340cd491ad412c"  # in every release


def test_each_file_that_makes_tokens_of_messages_tells_tokenizers_apart(tmp_path: Path) -> None:
    digests = {tokenizer_digest(tmp_path)}
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        *(f"{templates.name}/{n}.jinja" for n in ("rag", "tool_use")),
    ):
        for content in ("one", "two"):
            (tmp_path / name).write_text(content)
            digests.add(tokenizer_digest(tmp_path))
    (templates / "rag.jinja").rename(templates / "other.jinja")
    (tmp_path / "README.md").write_text("of no tokens")
    assert len(digests | {tokenizer_digest(tmp_path)}) == 10


def test_fingerprint_tells_deployments_apart() -> None:
    other = {"model": "m", "revision": "s", "tokenizer": "u", "block_size": 8, "dtype": "f", "seed": "v"}
    values = {name: getattr(DEPLOYMENT, name) for name in DEPLOYMENT.__struct_fields__}
    prints = {Deployment(**{**values, name: value}).fingerprint for name, value in other.items()}
    assert len(prints | {DEPLOYMENT.fingerprint}) == len(other) + 1
    assert all(len(fingerprint) == 32 for fingerprint in prints)
