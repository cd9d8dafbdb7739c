"""What the registry's commands cost a Redis: its CPU time, its memory, and how long a caller waits."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine.config import RegistryConfig
from quire.engine.hashing import Digest
from quire.engine.registry.deployment import Deployment
from quire.engine.registry.redis import LOOKUP, REPLICAS, Keys, Load, Registry
from quire.loadtest.servers.redis_server import RedisServer
from quire.service.router.directory import FIELDS

BATCH = 512  # digests in a publication
PROMPT = 512  # blocks of the prompt that is looked up
PROBES = 10  # members that a bisection of so many asks for, where it does not end with the first
FEW, MANY = 16, 128  # replicas, between which costs grow by what each costs
ROUNDS = 50


@dataclass(frozen=True, slots=True)
class RedisCosts:
    """Microseconds are CPU time of Redis' one thread, sockets and all; waits are a caller's."""

    publish_us: float  # that changes nothing
    change_us: float  # more for each digest that is added or removed
    lookup_us: float  # among no replicas
    replica_us: float  # more for each replica that holds nothing of the prompt
    probe_us: float  # more for each further digest that is looked for
    listed_us: float  # for each replica of which a router reads what it says of itself
    block_bytes: float
    replica_bytes: float  # without blocks
    publish_wait_us: float  # median, of one that changes nothing
    lookup_wait_us: float

    def publishing(self, publications: float, changes: float) -> float:
        """Return the microseconds of so many publications with so many changes in all."""
        return publications * self.publish_us + changes * self.change_us

    def looking_up(self, replicas: int, with_the_first_block: int, blocks: int) -> float:
        """Return the microseconds of a lookup of so many blocks, of which some replicas hold the first."""
        probes = with_the_first_block * max(0, blocks.bit_length())
        return self.lookup_us + replicas * self.replica_us + probes * self.probe_us

    def listing(self, replicas: int) -> float:
        """Return the microseconds of a router's look at who is registered."""
        return self.lookup_us + replicas * self.listed_us


def measure(server: RedisServer, blocks: int, rounds: int = ROUNDS) -> RedisCosts:
    """Measure an empty Redis that nobody else uses, by the registry's own commands; it is empty after.

    Its replicas have so many blocks each, at least BATCH. No two commands are about the same blocks: the
    second would find them in the processor's caches. rounds: of each command, whose mean counts.
    """
    fleet = _Fleet(server, rounds)
    fleet.join(FEW)
    fleet.fill(blocks)
    nothing_few = _timed(server, fleet.look_up, rounds)
    listed_few = _timed(server, fleet.list_replicas, rounds)
    before = server.used_bytes()
    fleet.join(MANY - FEW)
    joined = server.used_bytes()
    fleet.fill(blocks)
    filled = server.used_bytes()
    nothing_many = _timed(server, fleet.look_up, rounds)
    listed_many = _timed(server, fleet.list_replicas, rounds)
    heartbeat = _timed(server, fleet.heartbeat, rounds)
    changed = _timed(server, fleet.change, rounds)
    fleet.hold_prompts()
    found_many = _timed(server, fleet.look_up_held, rounds)
    server.client.flushall()
    fleet.leave()
    replica_us = max(0.0, (nothing_many.us - nothing_few.us) / (MANY - FEW))
    return RedisCosts(
        publish_us=heartbeat.us,
        change_us=max(0.0, changed.us - heartbeat.us) / (2 * BATCH),
        lookup_us=max(0.0, nothing_few.us - FEW * replica_us),
        replica_us=replica_us,
        probe_us=max(0.0, found_many.us - nothing_many.us) / (MANY * PROBES),
        listed_us=max(0.0, listed_many.us - listed_few.us) / (MANY - FEW),
        block_bytes=(filled - joined) / ((MANY - FEW) * blocks),
        replica_bytes=(joined - before) / (MANY - FEW),
        publish_wait_us=heartbeat.wait_us,
        lookup_wait_us=nothing_few.wait_us,
    )


@dataclass(frozen=True)
class _Timed:
    us: float
    wait_us: float


class _Fleet:
    """Replicas of one deployment, by the code with which a replica publishes."""

    def __init__(self, server: RedisServer, rounds: int) -> None:
        self._client = server.client
        self._url = f"{server.url}?socket_timeout=60"
        self._deployment = Deployment(
            model="m", revision="r", tokenizer="t", block_size=16, dtype="bfloat16", seed="s"
        )
        self._keys = Keys(self._deployment.fingerprint)
        self._replicas: list[Registry] = []
        self._seqs: list[int] = []
        self._oldest: list[list[Digest]] = []  # of each that has been filled
        self._turns = itertools.count()
        self._prompts = [_digests(PROMPT) for _ in range(rounds + 1)]
        self._held = iter(self._prompts)

    def join(self, count: int) -> None:
        for _ in range(count):
            config = RegistryConfig(
                redis_url=self._url, advertise_url=f"http://10.0.0.{len(self._replicas)}:8000", lease=600
            )
            registry = Registry(config, self._deployment, [], "parity", "1")
            self._replicas.append(registry)
            self._seqs.append(0)
            self._publish(len(self._replicas) - 1, [], [], anew=True)

    def fill(self, blocks: int) -> None:
        """Give so many to each that has joined since."""
        for at in range(len(self._oldest), len(self._replicas)):
            batches = [_digests(min(BATCH, blocks - begin)) for begin in range(0, blocks, BATCH)]
            for batch in batches:
                self._publish(at, batch, [])
            self._oldest.append(batches[0])

    def heartbeat(self) -> None:
        self._publish(self._next(), [], [])

    def change(self) -> None:
        """As many come as go."""
        at, fresh = self._next(), _digests(BATCH)
        self._publish(at, fresh, self._oldest[at])
        self._oldest[at] = fresh

    def look_up(self) -> None:
        """Look up a prompt that nobody holds."""
        self._look_up(_digests(PROMPT))

    def hold_prompts(self) -> None:
        """Have all hold the first half of each of some prompts."""
        held = [digest for prompt in self._prompts for digest in prompt[: PROMPT // 2]]
        for at in range(len(self._replicas)):
            for begin in range(0, len(held), BATCH):
                self._publish(at, held[begin : begin + BATCH], [])

    def look_up_held(self) -> None:
        """Look up one of these that has not been looked up yet."""
        self._look_up(next(self._held))

    def list_replicas(self) -> None:
        self._client.eval_ro(REPLICAS, 1, self._keys.replicas, self._keys.meta, *FIELDS)

    def leave(self) -> None:
        for replica in self._replicas:
            replica.disconnect()

    def _look_up(self, prompt: list[Digest]) -> None:
        keys = self._keys
        self._client.eval_ro(LOOKUP, 1, keys.replicas, keys.meta, keys.blocks, b"".join(prompt))

    def _next(self) -> int:
        return next(self._turns) % len(self._replicas)

    def _publish(self, at: int, added: list[Digest], removed: list[Digest], *, anew: bool = False) -> None:
        self._seqs[at] += 1
        self._replicas[at].publish(self._seqs[at], added, removed, Load(blocks=1), anew=anew)


def _timed(server: RedisServer, call: Callable[[], None], rounds: int) -> _Timed:
    """Return what a call costs Redis, of all rounds the mean, and how long it is waited for, the median."""
    call()  # the script is compiled, connections are made
    waits = []
    before = server.cpu_seconds()
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        waits.append((time.perf_counter() - begin) * 1e6)
    return _Timed((server.cpu_seconds() - before) / rounds * 1e6, _median(waits))


def _median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]


def _digests(count: int) -> list[Digest]:
    digests = secrets.token_bytes(16 * count)
    return [digests[at : at + 16] for at in range(0, len(digests), 16)]
