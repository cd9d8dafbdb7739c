"""What a subscriber of KV events knows of an engine, while messages are lost too."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.engine.config import KVEventsConfig
from quire.engine.core import EngineCore
from quire.engine.registry.kv_event_publisher import KVEventPublisher
from quire.engine.registry.kv_events import KVEventLog, sources_of
from tests.engine.simulation import make_core, random_request

BLOCK_SIZE = 4
MAX_MODEL_LEN = 1000
WINDOWS = (5, MAX_MODEL_LEN)  # of a group with a window, and of one more that keeps all
GROUPS = [((), True), (WINDOWS, True), (WINDOWS[:1], False)]  # and whether there is one before these

Blocks = dict[tuple[str, int | None], set[bytes]]  # by tier and cache group


class Engine:
    """An engine with a random workload in little memory, and the log of its caches."""

    def __init__(
        self,
        seed: int = 0,
        max_changes: int = 1000,
        windows: tuple[int, ...] = (),
        keeps_all: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        num_blocks, num_host_blocks = (84, 40) if len(windows) > 1 else (24, 12)
        self.core: EngineCore = make_core(
            num_blocks,
            BLOCK_SIZE,
            4,
            16,
            num_host_blocks=num_host_blocks,
            mode="swap",
            windows=windows,
            keeps_all=keeps_all,
        )
        self.sources = sources_of(self.core.scheduler.blocks, MAX_MODEL_LEN)
        self.log = KVEventLog(self.sources, BLOCK_SIZE, max_changes)
        self._requests = 0

    def work(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < 0.4:
                self.core.add(random_request(self.rng, self._requests, longest=20, widest=3))
                self._requests += 1
            self.core.step()

    @property
    def cached(self) -> Blocks:
        held = {
            (source.medium, source.group): {prefix.digest for prefix in source.cache.prefixes()}
            for source in self.sources
        }
        return {place: digests for place, digests in held.items() if digests}


class Subscriber:
    """Reads batches as vLLM documents them, knowing nothing of how they are made."""

    def __init__(self) -> None:
        self.held: Blocks = defaultdict(set)
        self.tokens: dict[bytes, tuple[bytes | None, list[int]]] = {}
        self.groups: dict[int | None, tuple[str | None, int | None]] = {}  # what their layers see

    @property
    def blocks(self) -> Blocks:
        return {place: digests for place, digests in self.held.items() if digests}

    def read(self, payload: bytes) -> None:
        stamp, events, rank = msgspec.msgpack.decode(payload)
        assert stamp > 0 and rank == 0
        for tag, *fields in events:
            getattr(self, tag)(*fields)

    def BlockStored(
        self, hashes: list[bytes], parent: bytes | None, tokens: list[int], size: int, *more: Any
    ) -> None:
        lora_id, medium, lora_name, keys, group, kind, window = more
        extra_keys = [None] * len(hashes) if keys is None else keys
        assert lora_id is None and lora_name is None and size == BLOCK_SIZE
        assert len(tokens) == size * len(hashes) and len(extra_keys) == len(hashes)
        assert self.groups.setdefault(group, (kind, window)) == (kind, window)
        assert not self.held[medium, group].intersection(hashes), "stored twice"
        self.held[medium, group].update(hashes)
        for at, digest in enumerate(hashes):
            known = (parent, tokens[at * size : (at + 1) * size])
            assert self.tokens.setdefault(digest, known) == known
            parent = digest

    def BlockRemoved(self, hashes: list[bytes], medium: str, group: int | None) -> None:
        assert self.held[medium, group].issuperset(hashes), "removed without having been stored"
        self.held[medium, group].difference_update(hashes)

    def AllBlocksCleared(self) -> None:
        self.held.clear()


class Line:
    """A publisher's sockets, and a subscriber's that are connected to them."""

    def __init__(self, folder: Path, engine: Engine, **settings: Any) -> None:
        events, replay = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=events,
            replay_endpoint=replay,
            topic="kv@pod@model",
            **settings,
        )
        self.context = zmq.Context()
        self.publisher = KVEventPublisher(config, engine.log)
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(events)
        self.events.subscribe(b"kv@")
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(replay)

    def batches(self, until: int) -> list[tuple[int, bytes]]:
        """Return those that come, up to the one with the number `until`."""
        found: list[tuple[int, bytes]] = []
        while not found or found[-1][0] != until:
            assert self.events.poll(10_000), "no message came"
            topic, number, payload = self.events.recv_multipart()
            assert topic == b"kv@pod@model"
            found.append((int.from_bytes(number, "big"), payload))
        return found

    def missed(self, first: int) -> list[tuple[int, bytes]]:
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert self.replay.poll(10_000), "no answer came"
            empty, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self.publisher.stop()
        self.context.destroy(linger=0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("windows", "keeps_all"), GROUPS)
def test_stored_minus_removed_is_what_is_cached(seed: int, windows: tuple[int, ...], keeps_all: bool) -> None:
    engine, subscriber = Engine(seed, windows=windows, keeps_all=keeps_all), Subscriber()
    for _ in range(60):
        engine.work(engine.rng.randrange(1, 12))
        events = engine.log.take()
        subscriber.read(msgspec.msgpack.encode([1.0, events, 0]))
        assert subscriber.blocks == engine.cached
    groups = range(keeps_all + len(windows)) if windows else [None]
    assert set(subscriber.blocks) == {(tier, group) for tier in ("GPU", "CPU") for group in groups}
    chains = {digest: parent for digest, (parent, _) in subscriber.tokens.items()}
    told_of = set(chains.values()) - {None} <= set(chains)
    assert told_of or not keeps_all, "a parent was never told of"


def test_a_group_is_named_where_there_are_several() -> None:
    engine, subscriber = Engine(windows=WINDOWS), Subscriber()
    engine.work(40)
    events = engine.log.take()
    subscriber.read(msgspec.msgpack.encode([1.0, events, 0]))
    full, window = ("full_attention", None), ("sliding_window", 5)
    assert subscriber.groups == {0: full, 1: window, 2: full}
    for windows, keeps_all, groups in (((), True, {None: (None, None)}), ((5,), False, {0: window})):
        alone, subscriber = Engine(windows=windows, keeps_all=keeps_all), Subscriber()
        alone.work(40)
        events = alone.log.take()
        subscriber.read(msgspec.msgpack.encode([1.0, events, 0]))
        assert subscriber.groups == groups


@pytest.mark.parametrize(("windows", "keeps_all"), GROUPS[1:])
def test_a_subscriber_tells_how_far_a_prompt_is_found(windows: tuple[int, ...], keeps_all: bool) -> None:
    """Behind the last block before which each group has what the next token reads."""
    engine, subscriber = Engine(5, windows=windows, keeps_all=keeps_all), Subscriber()
    blocks = engine.core.scheduler.blocks
    lengths = set()
    for _ in range(60):
        engine.work(4)
        subscriber.read(msgspec.msgpack.encode([1.0, engine.log.take(), 0]))
        for group in engine.core.scheduler.state.waiting:
            sequence = group.in_cache[0]
            found = blocks.match(sequence)
            if any(cache.computing for cache in blocks.caches):
                continue  # nobody is told of these before they are there
            most = (sequence.num_tokens - 1) // BLOCK_SIZE  # the last token is computed in any case
            digests = [prefix.digest for prefix in sequence.prefixes[:most]]
            assert len(found) == usable(subscriber, digests)
            lengths.add(len(found))
    assert len(lengths) > 2


def usable(subscriber: Subscriber, digests: list[bytes]) -> int:
    """Return behind how many of a prompt's blocks an engine can go on, by what it has told."""

    def goes_on_behind(count: int) -> bool:
        for group, (_, window) in subscriber.groups.items():
            first = 0 if window is None else max(0, count * BLOCK_SIZE + 1 - window) // BLOCK_SIZE
            held = subscriber.held["GPU", group] | subscriber.held["CPU", group]
            if not held.issuperset(digests[first:count]):
                return False
        return True

    return max(count for count in range(len(digests) + 1) if goes_on_behind(count))


def test_after_too_many_changes_everything_is_told_anew() -> None:
    engine, subscriber = Engine(max_changes=8), Subscriber()
    cleared = 0
    for _ in range(40):
        engine.work(12)
        events = engine.log.take()
        cleared += any(type(event).__name__ == "AllBlocksCleared" for event in events)
        subscriber.read(msgspec.msgpack.encode([1.0, events, 0]))
        assert subscriber.blocks == engine.cached
    assert 1 < cleared < 40


def test_blocks_in_a_row_are_one_event() -> None:
    engine = Engine()
    engine.core.add(random_request(random.Random(5), 0, longest=20, widest=1))
    while engine.core.has_work:
        engine.core.step()
    cleared, *stored = engine.log.take()
    assert type(cleared).__name__ == "AllBlocksCleared" and len(stored) == 1
    assert len(engine.cached["GPU", None]) > 1


@pytest.mark.parametrize("windows", [(), WINDOWS])
def test_a_subscriber_that_lost_messages_asks_for_them(tmp_path: Path, windows: tuple[int, ...]) -> None:
    engine, subscriber = Engine(1, windows=windows), Subscriber()
    line = Line(tmp_path, engine)
    line.publisher.start()
    try:
        sent = -1
        for number, payload in line.missed(0):  # a subscriber that comes late begins with these
            subscriber.read(payload)
            sent = number
        for _ in range(20):
            before = engine.cached
            engine.work(10)
            if engine.cached == before:
                continue
            while not (got := line.missed(sent + 1)) or subscriber_after(subscriber, got) != engine.cached:
                pass  # the publisher gathers changes for a moment
            for number, payload in got:
                assert number == sent + 1
                subscriber.read(payload)
                sent = number
        assert subscriber.blocks == engine.cached
        heard = line.batches(sent)  # and those that were sent meanwhile are the same
        assert dict(heard).items() <= dict(line.missed(0)).items()
    finally:
        line.close()


def subscriber_after(subscriber: Subscriber, batches: list[tuple[int, bytes]]) -> Blocks:
    """Return what the subscriber would know after these batches."""
    copy = Subscriber()
    copy.held |= {place: set(blocks) for place, blocks in subscriber.blocks.items()}
    for _, payload in batches:
        copy.read(payload)
    return copy.blocks


@pytest.mark.parametrize("windows", [(), WINDOWS])
def test_what_is_kept_no_more_is_answered_by_everything(tmp_path: Path, windows: tuple[int, ...]) -> None:
    engine, subscriber = Engine(2, windows=windows), Subscriber()
    line = Line(tmp_path, engine, buffer_steps=2)
    try:
        for _ in range(8):
            engine.work(20)
            line.publisher.publish()
        line.publisher.start()
        ((number, payload),) = line.missed(1)
        subscriber.read(payload)
        assert number == 7 and subscriber.blocks == engine.cached
        assert [number for number, _ in line.missed(6)] == [6, 7]
        assert line.missed(8) == []
    finally:
        line.close()


def test_a_malformed_question_ends_nothing(tmp_path: Path) -> None:
    engine = Engine(3)
    engine.work(30)
    line = Line(tmp_path, engine)
    line.publisher.start()
    try:
        line.replay.send_multipart([b"", b"first"])
        line.replay.send(b"")
        assert len(line.missed(0)) == 1
    finally:
        line.close()


def test_an_endpoint_that_is_taken_is_refused_by_name(tmp_path: Path) -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://no.such.host.invalid*:1")
    with pytest.raises(ValueError, match=r"--kv-events-config: 'tcp://no\.such\.host\.invalid\*:1'"):
        KVEventPublisher(config, Engine().log)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"endpoint": "http://x"}', "endpoint must begin with tcp://"),
        ('{"buffer_steps": 0}', "buffer_steps must be at least 1"),
        ('{"end_point": "tcp://*:1"}', "unknown field `end_point`"),
        ('{"publisher": "kafka"}', "Invalid enum value 'kafka'"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(given: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(given, type=KVEventsConfig)
