"""A fleet on virtual time: replicas that evict and publish, routers that place, and one real Redis."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from quire.engine.config import RegistryConfig
from quire.engine.registry.deployment import Deployment, seed_digest
from quire.engine.registry.prompt_hasher import PromptHasher
from quire.engine.registry.publisher import TICK_SECONDS
from quire.loadtest.registry_scale.costs import RedisCosts
from quire.loadtest.registry_scale.old_blocks import DIGEST_BYTES, OldBlocks
from quire.loadtest.registry_scale.paced_redis import PacedDirectory, PacedRegistry, RedisThread
from quire.loadtest.registry_scale.replica_process import LEASE, ReplicaProcess
from quire.loadtest.registry_scale.router import Router
from quire.loadtest.registry_scale.virtual_time import VirtualTimeLoop
from quire.service.router.config import RouterConfig

BLOCK_SIZE = 16
PREFILL_SECONDS = 0.004  # a block
ANSWER_SECONDS = 0.1
REDIS_LEASE = 3600.0  # by the real Redis' clock; the simulation ends leases by its own

_SEED = 7
_TAIL = [1, 2, 3, 4, 5]  # less than a block


@dataclass
class Server:
    """A replica, whose processes come and go."""

    url: str
    process: ReplicaProcess
    epoch: int = 1
    is_up: bool = True
    requests: int = 0  # since the start


class Simulation:
    """Counts the repeats of prefixes, how many of them found theirs, and how many moved.

    Close it, or use it as a context manager.
    """

    def __init__(
        self,
        redis_url: str,
        costs: RedisCosts,
        num_replicas: int,
        capacity: int,
        seed: int,
        *,
        num_routers: int = 1,
        question_blocks: int = 2,
    ) -> None:
        """Begin with replicas whose caches, of `capacity` blocks, are empty.

        question_blocks: of each request, after its prefix.
        """
        self.rng = random.Random(seed)
        self.hits = self.repeats = self.moves = 0
        self.servers: dict[str, Server] = {}
        self._runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self._loop = self._runner.get_loop()
        self.redis = RedisThread(costs, self._loop.time)
        self._redis_url = f"{redis_url}?socket_timeout=60"
        self._capacity = capacity
        self._question_blocks = question_blocks
        self._deployment = Deployment(
            model=f"fleet-{secrets.token_hex(4)}",  # its own part of the registry
            revision="r",
            tokenizer="t",
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
            seed=seed_digest(_SEED),
        )
        self._parity = PromptHasher(BLOCK_SIZE, _SEED).parity()
        self._numbers = itertools.count(1)
        self._next_token = 0
        self._background: list[asyncio.Task[None]] = []
        self.join(num_replicas)
        self._session, self.routers = self._runner.run(self._open(num_routers))
        self.settle()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all that runs, and leave nothing in Redis."""
        self._runner.run(self._end())
        self._runner.close()
        for server in self.servers.values():
            server.process.leave()

    @property
    def now(self) -> float:
        return self._loop.time()

    def tokens(self, blocks: int) -> list[int]:
        """Return those of so many blocks that nobody has asked for."""
        begin, self._next_token = self._next_token, self._next_token + blocks * BLOCK_SIZE
        return list(range(begin, self._next_token))

    def run(self, order: Sequence[list[int]], concurrency: int, *, are_repeats: bool = True) -> None:
        """Ask for these prefixes, so many at once."""
        self._do(self._run(order, concurrency, are_repeats=are_repeats))
        self.settle()

    def arrive(self, order: Sequence[list[int]], a_second: float, *, are_repeats: bool = True) -> None:
        """Ask for these prefixes at so many a second, whatever the answers take."""
        self._do(self._arrive(order, a_second, are_repeats=are_repeats))

    def rounds(self, prefixes: Sequence[list[int]], count: int, concurrency: int = 2) -> float:
        """All prefixes in random order, again and again. How many of the requests found theirs."""
        self.hits = self.repeats = 0
        for _ in range(count):
            self.run(self.rng.sample(prefixes, len(prefixes)), concurrency)
        return self.hits / self.repeats

    def settle(self, seconds: float = 2.0) -> None:
        self._do(asyncio.sleep(seconds))

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        self._loop.call_later(seconds, what)

    def join(self, count: int, *, filled: int = 0) -> None:
        """Add replicas that nobody knows yet, with so many blocks `filled` that nobody asks for again."""
        for _ in range(count):
            number = next(self._numbers)
            url = f"http://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8000"
            self.servers[url] = server = Server(url, self._process(url, 1, filled=filled))
            self._start(server)
            if filled:
                self.redis.rest()  # it was filled over hours

    def restart(self, server: Server) -> None:
        """Begin anew with an empty cache, as a new process does; what runs is answered all the same."""
        server.process.die()
        server.epoch += 1
        server.process = self._process(server.url, server.epoch)
        self._start(server)

    def kill(self, server: Server) -> None:
        """End it without a word. The registry believes in it until its lease ends."""
        server.is_up = False
        self.later(LEASE, server.process.leave)

    def _process(self, url: str, epoch: int, *, filled: int = 0) -> ReplicaProcess:
        config = RegistryConfig(redis_url=self._redis_url, advertise_url=url, lease=REDIS_LEASE)
        registry = PacedRegistry(self.redis, config, self._deployment, self._parity, f"{epoch:06d}")
        old = OldBlocks(self.rng.randbytes(filled * DIGEST_BYTES))
        return ReplicaProcess(registry, self._capacity, self._loop.time, old)

    def _start(self, server: Server) -> None:
        server.process.tick()
        self._background.append(self._loop.create_task(self._publish(server, server.process)))

    async def _publish(self, server: Server, process: ReplicaProcess) -> None:
        await asyncio.sleep(self.rng.random() * TICK_SECONDS)
        while server.is_up and server.process is process:
            process.tick()
            await asyncio.sleep(TICK_SECONDS)

    async def _open(self, num_routers: int) -> tuple[aiohttp.ClientSession, list[Router]]:
        session, config = aiohttp.ClientSession(), RouterConfig(model="", redis_url=self._redis_url)
        routers = []
        for _ in range(num_routers):
            directory = PacedDirectory(self._redis_url, self.redis)
            router = Router(config, directory, self._deployment, _SEED, session, self._is_ready, self.rng)
            self._background.append(self._loop.create_task(self._route(router)))
            routers.append(router)
        return session, routers

    async def _route(self, router: Router) -> None:
        await asyncio.sleep(self.rng.random() / 2)  # routers do not look all at once
        await router.run()

    def _is_ready(self, url: str) -> bool:
        return self.servers[url].is_up

    async def _end(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for router in self.routers:
            await router.watch.close()
        await self._session.close()

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        """Let it be done, and meanwhile whatever else is due."""
        self._runner.run(what)
        for task in self._background:
            if task.done():
                task.result()  # raises what ended it

    async def _run(self, order: Sequence[list[int]], concurrency: int, *, are_repeats: bool) -> None:
        free = asyncio.Semaphore(concurrency)

        async def ask(prefix: list[int]) -> None:
            await self._ask(prefix, is_repeat=are_repeats)
            free.release()

        async with asyncio.TaskGroup() as group:
            for prefix in order:
                await free.acquire()
                group.create_task(ask(prefix))

    async def _arrive(self, order: Sequence[list[int]], a_second: float, *, are_repeats: bool) -> None:
        async with asyncio.TaskGroup() as group:
            for prefix in order:
                await asyncio.sleep(self.rng.expovariate(a_second))
                group.create_task(self._ask(prefix, is_repeat=are_repeats))

    async def _ask(self, prefix: list[int], *, is_repeat: bool) -> None:
        router = self.rng.choice(self.routers)
        location = await router.locate(prefix + self.tokens(self._question_blocks) + _TAIL)
        placement, digests = router.choose(location, self.now)
        while not self.servers[placement.replica.url].is_up:
            placement.replica.lost("nobody answers there")
            placement.replica.sent_prefixes.refused(digests)
            placement, digests = router.choose(location, self.now)
        replica = placement.replica
        server = self.servers[replica.url]
        process = server.process
        found = process.begin(digests)
        self.moves += placement.reason == "moved"
        if is_repeat:
            self.repeats += 1
            self.hits += found >= 0.95 * (len(prefix) // BLOCK_SIZE)
        server.requests += 1
        replica.in_flight += 1
        await asyncio.sleep((len(digests) - found) * PREFILL_SECONDS * process.running)
        process.computed(digests)
        replica.sent_prefixes.answered(digests, self.now)
        await asyncio.sleep(ANSWER_SECONDS)
        process.end(digests)
        replica.in_flight -= 1
