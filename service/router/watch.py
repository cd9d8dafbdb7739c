"""Follows the registry: which deployments are ours, who is in them, and whether it answers at all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.deployment import Deployment, pinned_digest
from engine.prefix_cache import Digest
from engine.prompt_hasher import PromptHasher
from engine.registry import FAILURES
from service.router.directory import Directory, Registered
from service.router.placement import Location

log = logging.getLogger("quire.router")

FAILURES_UNTIL_SILENT = 3  # in a row; then requests wait for the registry no more until it has answered us


@dataclass(frozen=True)
class Identity:
    """What the router shares with the replicas it is for."""

    model: str
    revision: str
    tokenizer: str
    seed: str

    def difference(self, deployment: Deployment) -> str | None:
        """The name of what differs there."""
        for name in ("model", "revision", "tokenizer", "seed"):
            if getattr(self, name) != getattr(deployment, name):
                return name
        return None


class RegistryWatch:
    def __init__(
        self,
        directory: Directory,
        identity: Identity,
        seed: int,
        on_registered: Callable[[str, list[Registered]], None],
    ) -> None:
        """`on_registered` is told who is in a deployment of ours, by its fingerprint, at each look."""
        self.state: Literal["ok", "degraded"] = "degraded"
        self.hashers: dict[str, PromptHasher] = {}  # by the fingerprints of our deployments
        self._directory = directory
        self._identity = identity
        self._seed = seed
        self._on_registered = on_registered
        self._failures = 0
        self._complained: set[str] = set()

    async def run(self, poll_seconds: float, scan_seconds: float) -> None:
        scanned = float("-inf")
        while True:
            try:
                if time.monotonic() - scanned >= scan_seconds or not self.hashers:
                    await self._scan()
                    scanned = time.monotonic()
                for fingerprint in list(self.hashers):
                    await self._look(fingerprint)
                self._succeeded()
            except FAILURES as error:
                self._failed(error)
            await asyncio.sleep(poll_seconds)

    async def locate(self, salt: str, tokens: Sequence[int]) -> Location:
        """Takes some tens of ms at most; a registry that is known to be silent is not asked."""
        hashers = dict(self.hashers)
        prefixes = {fingerprint: hasher.digests(salt, tokens) for fingerprint, hasher in hashers.items()}
        sizes = {fingerprint: hasher.block_size for fingerprint, hasher in hashers.items()}
        return Location(len(tokens), prefixes, sizes, await self._lookup(prefixes))

    async def _lookup(self, prefixes: dict[str, list[Digest]]) -> dict[str, int] | None:
        if self.state != "ok":
            return None
        asked = (self._directory.lookup(*each) for each in prefixes.items() if each[1])
        try:
            found = await asyncio.gather(*asked)  # at once: a request waits as long as for one
        except FAILURES as error:
            self._failed(error)
            return None
        self._failures = 0
        return {url: blocks for held in found for url, blocks in held.items()}

    async def close(self) -> None:
        await self._directory.close()

    async def _scan(self) -> None:
        for fingerprint in await self._directory.fingerprints():
            if fingerprint not in self.hashers:
                await self._consider(fingerprint)

    async def _consider(self, fingerprint: str) -> None:
        registered = await self._directory.registered(fingerprint)
        if not registered:
            return
        deployment = registered[0].deployment
        difference = self._identity.difference(deployment)
        if difference is None and deployment.fingerprint == fingerprint:
            pinned = await self._directory.pinned(fingerprint)
            if pinned_digest(pinned) == deployment.pinned:
                self.hashers[fingerprint] = PromptHasher(deployment.block_size, self._seed, pinned)
                return
            difference = "pinned prefixes"
        self._complain(
            logging.WARNING,  # they may well be for another router
            fingerprint,
            f"replicas at {registered[0].url} are not routed to: their {difference or 'fingerprint'} is not "
            "the router's. Give both the same MODEL and --cache-seed",
        )

    async def _look(self, fingerprint: str) -> None:
        expected = self.hashers[fingerprint].parity()
        trusted = []
        for replica in await self._directory.registered(fingerprint):
            if replica.parity == expected:
                trusted.append(replica)
            else:
                self._complain(
                    logging.ERROR,
                    replica.url,
                    f"{replica.url} hashes blocks in another way and is not routed to: run one "
                    "version everywhere",
                )
        self._on_registered(fingerprint, trusted)

    def _complain(self, level: int, about: str, message: str) -> None:
        if about not in self._complained:
            self._complained.add(about)
            log.log(level, message)

    def _succeeded(self) -> None:
        self._failures = 0
        if self.state != "ok":
            self.state = "ok"
            log.info("the registry answers")

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self.state == "ok" and self._failures >= FAILURES_UNTIL_SILENT:
            self.state = "degraded"
            log.warning("the registry is silent, requests go to the least loaded replica: %s", error)
