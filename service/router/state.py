"""The state that the router's endpoints share."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import aiohttp

from quire.service.config import ServiceConfig
from quire.service.errors import ApiError, not_ready
from quire.service.http.cancellation import Interruptible, Stoppable
from quire.service.keys import KeyRing
from quire.service.metrics.loop_watch import LoopWatch
from quire.service.router.fleet import Fleet
from quire.service.router.held import HeldBytes
from quire.service.router.metrics import RouterMetrics
from quire.service.router.placement import NOWHERE, Location, Placement, choose
from quire.service.router.replica import Replica
from quire.service.router.stream_affinity import StreamAffinity
from quire.service.text.template_renderer import TemplateRenderer
from quire.service.tracing.exporter import SpanExporter

if TYPE_CHECKING:
    from quire.service.router.prompt import Prompt, PromptReader
    from quire.service.router.registry_watch import RegistryWatch


class RouterState:
    """Lives as long as the process. What is None comes up after the port is bound, or never."""

    def __init__(self, config: ServiceConfig, max_held_bytes: int) -> None:
        self.config = config
        self.keys = KeyRing(config.api_keys, config.api_key_file)
        self.metrics = RouterMetrics()
        self.draining = False
        self.generations: set[Interruptible] = set()
        self.streams: set[Stoppable] = set()
        self.loop_watch = LoopWatch()
        self.stream_affinity = StreamAffinity()
        self.response_affinity = StreamAffinity()
        self.request_affinity = StreamAffinity()
        endpoint = config.otlp_endpoint
        self.exporter = None if endpoint is None else SpanExporter(endpoint, "quire-router")
        self.held = HeldBytes(max_held_bytes)
        self.pool = ThreadPoolExecutor(2, "tokenizer")
        self.renderer = TemplateRenderer(config.max_prompt_bytes)
        self.session: aiohttp.ClientSession | None = None
        self.fleet: Fleet | None = None
        self.watch: RegistryWatch | None = None  # None: there is no registry
        self.reader: PromptReader | None = None  # of prompts; None: nobody says where they are cached
        self._rng = random.Random()

    @property
    def replicas(self) -> Iterable[Replica]:
        return () if self.fleet is None else self.fleet

    def check_open(self) -> None:
        """Raises ApiError 503 before the router is up and once it shuts down."""
        if self.draining:
            raise not_ready("the router is shutting down", 5)
        if self.fleet is None:
            raise not_ready("the router is still loading")

    def check_ready(self) -> None:
        """Raises ApiError 503 unless requests would be answered."""
        self.check_open()
        if not any(replica.up for replica in self._staying()):
            raise self._nobody()

    def _staying(self) -> list[Replica]:
        """Return those who may be sent something new."""
        return [replica for replica in self.replicas if not replica.leaving]

    def _nobody(self) -> ApiError:
        """Return why a request has nowhere to go."""
        silent = self.watch is not None and self.watch.silent
        return not_ready("no replica is ready" + ", and the registry does not answer" * silent, 2)

    async def everybody(self) -> Iterable[Replica]:
        """Return those who may have what only one of them has."""
        return self.replicas

    async def locate(self, prompt: Prompt | None) -> Location:
        """Return where a prompt's blocks are, by the registry."""
        if prompt is None or self.watch is None:
            return NOWHERE
        begin = time.perf_counter()
        location = await self.watch.locate(prompt.salt, prompt.tokens)
        self.metrics.lookup.observe(time.perf_counter() - begin)
        return location

    def has_others(self, tried: set[Replica]) -> bool:
        """Return whether there is anybody else to send to what was sent to `tried` in vain."""
        others = [replica for replica in self._staying() if replica not in tried]
        return any(replica.up or not replica.draining for replica in others)

    async def place_at(self, replica: Replica) -> Placement:
        """Return where the stream is that a request is about, whatever else runs. Raises ApiError 503."""
        return Placement.at_home(replica)

    async def place(self, location: Location, tried: set[Replica]) -> Placement:
        """Return where to send what was sent to `tried` in vain. Raises ApiError 503 if there is nobody."""
        ranks = {replica: _reluctance(replica, tried) for replica in self._staying()}
        if not ranks:
            raise self._nobody()
        least = min(ranks.values())
        return self.choose([replica for replica, rank in ranks.items() if rank == least], location)

    def choose(self, replicas: Sequence[Replica], location: Location) -> Placement:
        """Return the best of at least one."""
        silent = self.watch is not None and self.watch.state != "ok"
        return choose(replicas, location, time.monotonic(), self._rng, silent=silent)


def _reluctance(replica: Replica, tried: set[Replica]) -> tuple[bool, ...]:
    """Order whom to send something to; the least is the best.

    Who is down may be up again just now. That one drains may be a lie of the registry, but hardly where it
    is down, too.
    """
    down = not replica.up
    return down and replica.draining, replica in tried, down, replica.draining
