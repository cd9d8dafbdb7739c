"""Keeps the registry up to date from a thread of its own; nothing of the engine waits for it."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable

import msgspec

from quire.engine.config import (
    EngineConfig,
    EngineInfo,
    RegistryConfig,
    RegistryReport,
    RegistryState,
    StepStats,
)
from quire.engine.core import EngineCore
from quire.engine.hashing import Digest
from quire.engine.models.model_folders import resolve_folders
from quire.engine.registry.deployment import describe, hash_seed
from quire.engine.registry.journal import Journal, journal_of
from quire.engine.registry.prompt_hasher import PromptHasher
from quire.engine.registry.redis import FAILURES, Answer, Load, Registry

logger = logging.getLogger("quire.registry")

BATCH = 512  # changes a publication
TICK_SECONDS = 0.05
LOAD_SECONDS = 0.5  # how long a changed load may stay unpublished
HEARTBEATS = 3  # a lease
FIRST_PAUSE = 0.1  # seconds after a failure, doubled up to
LONGEST_PAUSE = 2.0
STOP_SECONDS = 5.0  # for which a publication under way is waited for, be it that a name takes long to resolve


class _Publication(msgspec.Struct):
    """A publication on its way, sent again as it is until it is known to have arrived."""

    added: list[Digest]
    removed: list[Digest]
    anew: bool = False


class Publisher:
    """Publishes what the journal tells, batch by batch in its order, and the load with it.

    After a failure it pauses, and after any doubt about what Redis holds it publishes everything anew.
    """

    def __init__(
        self,
        registry: Registry,
        journal: Journal,
        lease: float,
        blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`blocks`: how many KV blocks there are, in both tiers."""
        self.state: RegistryState = "degraded"  # until the first publication
        self._told_of_failure = False  # since it last was ok
        self._registry = registry
        self._journal = journal
        self._clock = clock
        self._heartbeat = lease / HEARTBEATS
        self._load = Load(blocks=blocks)
        self._published_load: Load | None = None
        self._published_at = float("-inf")
        self._waiting_since: float | None = None
        self._seq = 0
        self._count = 0  # digests that Redis must hold once what is under way has arrived
        self._rest: list[Digest] = []  # of everything, when it is published anew
        self._anew = True
        self._under_way: _Publication | None = None
        self._pause = 0.0
        self._paused_until = 0.0
        self._seconds: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-registry", daemon=True)

    # -- the engine's thread ----------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def observe(self, stats: StepStats) -> None:
        """Take the load after a step."""
        self._load = Load(
            running=stats.sequences_running,
            waiting=stats.waiting + stats.swapped,
            free_blocks=stats.free_blocks + stats.cached_blocks,
            blocks=self._load.blocks,
            draining=self._load.draining,
        )

    def drain(self) -> None:
        """Tell routers to send nothing more."""
        self._load = msgspec.structs.replace(self._load, draining=True)

    def report(self) -> RegistryReport:
        seconds, self._seconds = self._seconds, []
        since = self._waiting_since
        lag = 0.0 if since is None else self._clock() - since
        return RegistryReport(self.state, self._count, lag, self._journal.dropped, seconds)

    def stop(self) -> None:
        """Leave the registry. What fails now ends with the lease."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.info("the registry is not told that this replica ends: a publication is still under way")
            return
        try:
            self._registry.leave()
        except FAILURES as error:
            logger.info("the registry could not be told that this replica ends: %s", error)

    # -- its own ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            try:
                self.tick()
            except Exception as error:  # a bug, which must not end publishing for good
                logger.exception("publishing starts anew")
                self._under_way, self._anew = None, True
                self._fail(error)

    def tick(self) -> None:
        """Publish what has gathered, batch by batch; after a failure, once its pause is over."""
        now = self._clock()
        if self._waiting_since is None and len(self._journal):
            self._waiting_since = now
        if now < self._paused_until:
            return
        try:
            more = self._due()
            while more and not self._stopped.is_set():
                self._publish_next()
                more = bool(self._rest) or len(self._journal) >= BATCH  # less can wait for the next tick
        except FAILURES as error:
            self._fail(error)

    def _due(self) -> bool:
        if self._under_way or self._rest or self._anew or len(self._journal) or self._journal.overflown:
            return True
        age = self._clock() - self._published_at
        return age >= self._heartbeat or (self._load != self._published_load and age >= LOAD_SECONDS)

    def _publish_next(self) -> None:
        if self._under_way is None:
            self._under_way = self._next()
        publication, load, begin = self._under_way, self._load, self._clock()
        answer = self._registry.publish(
            self._seq + 1,
            publication.added,
            publication.removed,
            load,
            anew=publication.anew,
            whole=not self._rest,
        )
        now = self._clock()
        self._seconds.append(now - begin)
        self._accept(answer)
        self._pause = 0.0
        self._published_at, self._published_load = now, load
        if not len(self._journal) and not self._rest:
            self._waiting_since = None
            self._recover()

    def _next(self) -> _Publication:
        anew = self._anew or self._journal.overflown
        if anew:
            self._rest, self._count, self._anew = self._journal.restart(), 0, False
        if anew or self._rest:
            added, self._rest = self._rest[:BATCH], self._rest[BATCH:]
            removed: list[Digest] = []
        else:
            net = self._journal.take(BATCH)
            added = [digest for digest, reachable in net.items() if reachable]
            removed = [digest for digest, reachable in net.items() if not reachable]
        self._count += len(added) - len(removed)
        return _Publication(added, removed, anew)

    def _accept(self, answer: Answer) -> None:
        """Raises ValueError if the registry does not hold what it must."""
        anew = self._under_way is not None and self._under_way.anew
        self._under_way = None
        if answer.status == "OK" and answer.blocks == self._count:
            self._seq += 1
            return
        self._anew = True
        if answer.status == "FENCED":
            raise ValueError(
                "a newer process has registered with the same URL: give each replica its own --advertise-url"
            )
        if anew:  # publishing once more would not help either
            raise ValueError(
                f"Redis says {answer.status} and {answer.blocks} blocks instead of {self._count}"
            )
        logger.info("the registry has lost blocks of this replica: all are published again")

    def _recover(self) -> None:
        if self.state != "ok":
            self.state, self._told_of_failure = "ok", False
            logger.info("the registry holds %d blocks of this replica", self._count)

    def _fail(self, error: Exception) -> None:
        """Redis is not asked again for a while, each time for longer."""
        self._registry.disconnect()
        self.state = "degraded"
        if not self._told_of_failure:
            self._told_of_failure = True
            logger.warning("the registry fails, and is tried again every %g s: %s", LONGEST_PAUSE, error)
        self._pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * self._pause))
        self._paused_until = self._clock() + self._pause * random.uniform(0.75, 1.0)


def start_publisher(
    registry: RegistryConfig,
    config: EngineConfig,
    info: EngineInfo,
    core: EngineCore,
    pinned: list[list[int]],
) -> Publisher:
    """Publishes what `core` can find from now on; `pinned` are its prefixes for all tenants.

    Raises ValueError unless others can know its digests.
    """
    if not config.enable_prefix_caching or config.cache_seed is None:
        raise ValueError("--redis-url needs a prefix cache and a --cache-seed that the router knows")
    seed = hash_seed(config.cache_seed)
    folders = resolve_folders(config.model, config.lora)
    held = info.kv_cache_dtype + " latents" * bool(info.latent_width) + " indices" * bool(info.index_width)
    deployment = describe(config.model, config.lora, folders, info.block_size, held, seed, pinned)
    parity = PromptHasher(info.block_size, seed).parity()
    epoch = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    blocks = core.scheduler.blocks
    place = Registry(registry, deployment, pinned, parity, epoch, has_windows=blocks.windows is not None)
    journal = journal_of(blocks)
    publisher = Publisher(place, journal, registry.lease, info.num_blocks + info.num_host_blocks)
    publisher.start()
    return publisher
