"""Follows the registry: which deployments are ours, who is in them, and whether it answers at all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import redis

from quire.engine.hashing import Digest
from quire.engine.registry.deployment import Deployment, pinned_digest
from quire.engine.registry.prompt_hasher import PromptHasher
from quire.engine.registry.redis import FAILURES
from quire.service.router.complaints import Complaints
from quire.service.router.directory import Directory, Registered
from quire.service.router.placement import Location

log = logging.getLogger("quire.router")

MAX_DEPLOYMENTS = 4  # of ours: each hashes every prompt in its own way; an upgrade has two
DEPLOYMENT_SECONDS = 60.0  # without anybody in it, after which one is forgotten: longer than an outage
FAILURES_UNTIL_SILENT = 3  # in a row; then requests wait for the registry no more until it has answered us


@dataclass(frozen=True)
class Identity:
    """The names and seeds that the router shares with the replicas it is for."""

    model: str
    revision: str
    tokenizer: str
    seed: str

    def difference(self, deployment: Deployment) -> str | None:
        """Return the name of what differs there."""
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
        on_registered: Callable[[str, list[Registered]], bool],
    ) -> None:
        """`on_registered` is told who is in a deployment of ours, by its fingerprint, at each look.

        It returns whether any of them is ready.
        """
        self.state: Literal["ok", "degraded"] = "degraded"  # until the first answer
        self.silent = False  # it has failed, and not answered since; which was told
        self.hashers: dict[str, PromptHasher] = {}  # by the fingerprints of our deployments
        self._directory = directory
        self._identity = identity
        self._seed = seed
        self._on_registered = on_registered
        self._failures = 0
        self._seen: dict[str, float] = {}  # when somebody was last in our deployments
        self._proved: set[str] = set()  # those of them that had a replica that was ready: no mere claims
        self._complaints = Complaints()

    async def run(self, poll_seconds: float, scan_seconds: float) -> None:
        scanned = float("-inf")
        while True:
            scan = time.monotonic() - scanned >= scan_seconds or not self.hashers
            if await self.look(scan=scan) and scan:
                scanned = time.monotonic()
            await asyncio.sleep(poll_seconds)

    async def look(self, *, scan: bool) -> bool:
        """Look once at who is in our deployments; with `scan`, first at which ones there are.

        Nothing that Redis says ends it. Returns whether it answered.
        """
        try:
            if scan:
                await self._scan()
            await self._look_at_all()
        except FAILURES as error:
            self._failed(error)
            return False
        except Exception as error:
            self._complaints.make(logging.ERROR, repr(error), f"the registry could not be read: {error!r}")
            self._failed(error)
            return False
        self._succeeded()
        return True

    async def locate(self, salt: str, tokens: Sequence[int]) -> Location:
        """Takes some tens of ms at most; a registry that is known to be silent is not asked."""
        hashers = dict(self.hashers)
        prefixes = {fingerprint: hasher.digests(salt, tokens) for fingerprint, hasher in hashers.items()}
        sizes = {fingerprint: hasher.block_size for fingerprint, hasher in hashers.items()}
        return Location(len(tokens), prefixes, sizes, await self._lookup(prefixes))

    async def _lookup(self, prefixes: dict[str, list[Digest]]) -> dict[str, int] | None:
        if self.state != "ok":
            return None
        asked = [self._directory.lookup(*each) for each in prefixes.items() if each[1]]
        # At once: a request waits as long as for one.
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found: dict[str, int] = {}
        refused: list[redis.ResponseError] = []
        for answer in answers:
            if isinstance(answer, redis.ResponseError):  # one part of the registry is not in order
                refused.append(answer)
            elif isinstance(answer, FAILURES):
                self._failed(answer)
                return None
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found |= answer
        if refused and len(refused) == len(answers):
            self._failed(refused[0])
            return None
        self._failures = 0
        return found

    async def close(self) -> None:
        await self._directory.close()

    async def _scan(self) -> None:
        for fingerprint in await self._directory.fingerprints():
            if fingerprint in self.hashers:
                continue
            try:
                await self._consider(fingerprint)
            except (redis.ResponseError, ValueError) as error:  # of this one: others may be in order
                self._leave_out(fingerprint, error)

    async def _consider(self, fingerprint: str) -> None:
        registered = await self._directory.registered(fingerprint)
        if not registered:
            return
        deployment = registered[0].deployment
        for entry in registered:  # the first one may be a stranger
            if entry.deployment.fingerprint == fingerprint:
                deployment = entry.deployment
        difference = self._identity.difference(deployment)
        if difference is None and deployment.fingerprint == fingerprint:
            pinned = await self._directory.pinned(fingerprint) if deployment.pinned else []
            if pinned_digest(pinned) == deployment.pinned:
                hasher = await asyncio.to_thread(PromptHasher, deployment.block_size, self._seed, pinned)
                self._take(fingerprint, hasher, self._trusted(fingerprint, hasher, registered))
                return
            difference = "pinned prefixes"
        self._complaints.make(
            logging.WARNING,  # they may well be for another router
            fingerprint,
            f"replicas at {registered[0].url} are not routed to: their {difference or 'fingerprint'} is not "
            "the router's. Give both the same MODEL and --cache-seed",
        )

    def _take(self, fingerprint: str, hasher: PromptHasher, trusted: list[Registered]) -> None:
        """Hash as a deployment does, if there is room.

        One with a replica that is ready has the place of one that never had any.
        """
        is_ready = self._on_registered(fingerprint, trusted)
        if len(self.hashers) >= MAX_DEPLOYMENTS:
            unproved = next((each for each in self.hashers if each not in self._proved), None)
            if unproved is None or not is_ready:
                self._complaints.make(
                    logging.WARNING,
                    fingerprint,
                    f"replicas of {fingerprint} get requests by load only: there are {MAX_DEPLOYMENTS} kinds "
                    "of them already that cache in other ways",
                )
                return
            self._forget(unproved)
        self.hashers[fingerprint] = hasher
        self._seen[fingerprint] = time.monotonic()
        if is_ready:
            self._proved.add(fingerprint)

    async def _look_at_all(self) -> None:
        """Raises if there is nothing in order."""
        refused: list[redis.ResponseError] = []
        fingerprints = list(self.hashers)
        for fingerprint in fingerprints:
            try:
                await self._look(fingerprint)
            except redis.ResponseError as error:
                refused.append(error)
                self._leave_out(fingerprint, error)
                self._forget_deserted(fingerprint)
        if refused and len(refused) == len(fingerprints):
            raise refused[0]

    async def _look(self, fingerprint: str) -> None:
        now = time.monotonic()
        registered = await self._directory.registered(fingerprint)
        trusted = self._trusted(fingerprint, self.hashers[fingerprint], registered)
        if self._on_registered(fingerprint, trusted):
            self._proved.add(fingerprint)
        if trusted:
            self._seen[fingerprint] = now
        else:
            self._forget_deserted(fingerprint)

    def _trusted(
        self, fingerprint: str, hasher: PromptHasher, registered: list[Registered]
    ) -> list[Registered]:
        """Return those that hash blocks as `hasher` does."""
        expected, trusted = hasher.parity(), []
        for replica in registered:
            if replica.parity == expected and replica.deployment.fingerprint == fingerprint:
                trusted.append(replica)
            else:
                self._complaints.make(
                    logging.ERROR,
                    replica.url,
                    f"{replica.url} hashes blocks in another way and is not routed to: run one "
                    "version everywhere",
                )
        return trusted

    def _forget_deserted(self, fingerprint: str) -> None:
        if time.monotonic() - self._seen[fingerprint] > DEPLOYMENT_SECONDS:
            self._forget(fingerprint)

    def _forget(self, fingerprint: str) -> None:
        del self.hashers[fingerprint], self._seen[fingerprint]
        self._proved.discard(fingerprint)

    def _leave_out(self, fingerprint: str, error: Exception) -> None:
        message = f"the registry's part {fingerprint} is left out: {error}"
        self._complaints.make(logging.WARNING, f"{fingerprint} {error}", message)

    def _succeeded(self) -> None:
        self._failures = 0
        if self.state != "ok":
            self.state, self.silent = "ok", False
            log.info("the registry answers")

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self.silent or (self.state == "ok" and self._failures < FAILURES_UNTIL_SILENT):
            return
        self.state, self.silent = "degraded", True
        log.warning("the registry is silent, requests go to the least loaded known replica: %s", error)
