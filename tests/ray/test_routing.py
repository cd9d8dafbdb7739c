"""Who gets a request, where Ray has the last word: against a handle that does as Ray does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import BackPressureError

from quire.engine.registry.deployment import Deployment
from quire.engine.registry.redis import Load
from quire.ray.affinity import PrefixAffinity
from quire.ray.leases import HEADER
from quire.ray.routing import RayState
from quire.ray.wish import Wish
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError
from quire.service.router.directory import Registered
from quire.service.router.placement import NOWHERE, Location
from quire.service.router.prompt import Prompt

A, B = "http://10.0.0.1:1", "http://10.0.0.2:1"
BLOCKS = 400  # of each replica
DEPLOYMENT = Deployment(model="m", revision="r", tokenizer="t", block_size=16, dtype="bfloat16", seed="s")
F = DEPLOYMENT.fingerprint
DIGESTS = [bytes([number] * 16) for number in range(8)]
PROMPT = Location(8 * 16 + 1, {F: DIGESTS}, {F: 16}, {A: 0, B: 8})  # all of it is cached at B


class Watch:
    state = "ok"


class Handle:
    """Of a deployment with these replicas, of which some are full; calls fail first as they are told to."""

    def __init__(self, *urls: str, full: tuple[str, ...] = (), failures: tuple[Exception, ...] = ()) -> None:
        self.urls = list(urls)
        self.full = full
        self.failures = list(failures)
        self.lease = self.peek = self

    def options(self, *, stream: bool) -> Handle:
        return self

    def remote(self, wish: Wish) -> Call:
        return Call(self, wish)


class Call:
    def __init__(self, handle: Handle, wish: Wish) -> None:
        self._handle = handle
        self._wish = wish
        self._answers = self._run()

    def __await__(self) -> Any:
        return anext(self._answers).__await__()

    def __aiter__(self) -> AsyncIterator[tuple[str, bytes]]:
        return self._answers

    def __anext__(self) -> Coroutine[Any, Any, tuple[str, bytes]]:
        return self._answers.__anext__()  # type: ignore[return-value]

    def cancel(self) -> None:
        """Ray ends what it was doing."""

    async def _run(self) -> AsyncIterator[tuple[str, bytes]]:
        while True:
            ranks = await self._wish.rank(dict.fromkeys(self._handle.urls, BLOCKS))
            if self._handle.failures:
                raise self._handle.failures.pop(0)
            for rank in ranks:
                for url in rank:
                    if url not in self._handle.full:
                        yield url, b"token"
                        return
            await asyncio.sleep(0.01)


def state_of(handle: Handle) -> RayState:
    return RayState(ServiceConfig(served_model_names=("m",)), handle)


async def registered(handle: Handle) -> RayState:
    """One that knows two idle replicas of a deployment."""
    state = state_of(handle)
    state.watch = Watch()  # type: ignore[assignment]
    await state.everybody()
    state.register(F, [Registered(url, "1", 1, "p", DEPLOYMENT, Load(blocks=100)) for url in (A, B)])
    return state


def test_a_prompt_goes_where_it_is_cached_and_may_ask_there() -> None:
    async def run() -> None:
        state = await registered(Handle(A, B))
        placement = await state.place(PROMPT, set())
        assert (placement.replica.url, placement.reason) == (B, "prefix")
        assert placement.headers == ((HEADER, b"token"),)

    asyncio.run(run())


def test_who_is_full_is_passed_over_and_that_is_remembered() -> None:
    async def run() -> None:
        state = await registered(Handle(A, B, full=(B,)))
        placement = await state.place(PROMPT, set())
        assert (placement.replica.url, placement.predicted_tokens) == (A, 0)
        by_url = {replica.url: replica for replica in state.replicas}
        assert by_url[A].sent_prefixes.match(DIGESTS, 0.0) == 8
        assert by_url[B].sent_prefixes.match(DIGESTS, 0.0) == 0

    asyncio.run(run())


def test_who_was_tried_in_vain_or_has_failed_is_asked_last() -> None:
    async def run() -> None:
        state = await registered(Handle(A, B))
        first = (await state.place(PROMPT, set())).replica
        assert (await state.place(PROMPT, {first})).replica.url == A
        first.lost("it broke off")
        assert (await state.place(PROMPT, set())).replica.url == A

    asyncio.run(run())


async def affine(handle: Handle) -> RayState:
    """One without a registry that knows two idle replicas."""
    state = state_of(handle)
    state.affinity = PrefixAffinity(16)
    await state.everybody()
    return state


def prompt_of(tenant: str, turn: int) -> Prompt:
    return Prompt([*range(16 * 20), *[turn] * 16], tenant, whole=True)


def test_without_a_registry_a_tenant_stays_where_it_was_and_tenants_are_spread() -> None:
    async def run() -> None:
        state = await affine(Handle(A, B))
        homes: dict[str, set[str]] = {}
        for turn in range(6):
            for tenant in "abcdefgh":
                location = await state.locate(prompt_of(tenant, turn))
                placement = await state.place(location, set())
                assert placement.reason == ("prefix" if turn else "load")
                assert placement.predicted_tokens == (320 if turn else 0)
                homes.setdefault(tenant, set()).add(placement.replica.url)
        assert all(len(urls) == 1 for urls in homes.values())
        assert Counter(url for urls in homes.values() for url in urls) == {A: 4, B: 4}

    asyncio.run(run())


def test_without_a_registry_one_prefix_does_not_keep_one_replica_busy_alone() -> None:
    async def run() -> None:
        state = await affine(Handle(A, B))
        with ExitStack() as requests:  # none of which ends
            for turn in range(100):
                placement = await state.place(await state.locate(prompt_of("a", turn)), set())
                requests.enter_context(placement.replica.request())
            loads = sorted(replica.load for replica in state.replicas)
        assert sum(loads) == 100
        assert loads[1] <= 2 * loads[0]

    asyncio.run(run())


def test_without_a_registry_who_is_full_is_passed_over_and_then_both_have_it() -> None:
    async def run() -> None:
        handle = Handle(A, B)
        state = await affine(handle)
        first = (await state.place(await state.locate(prompt_of("a", 0)), set())).replica.url
        handle.full = (first,)
        other = (await state.place(await state.locate(prompt_of("a", 1)), set())).replica.url
        assert {first, other} == {A, B}
        assert (await state.locate(prompt_of("a", 2))).held == {A: 20, B: 20}

    asyncio.run(run())


def test_who_cannot_give_a_lease_is_not_asked_again_at_once() -> None:
    async def run() -> None:
        handle = Handle(A, B)
        state = await affine(handle)
        first = (await state.place(await state.locate(prompt_of("a", 0)), set())).replica
        handle.failures = [ActorUnavailableError("its node is gone", None)]
        assert (await state.place(await state.locate(prompt_of("a", 1)), set())).replica is not first

    asyncio.run(run())


def test_without_a_prefix_cache_ray_takes_the_less_busy_of_two() -> None:
    async def run() -> None:
        state = state_of(Handle(A, B))
        urls = {(await state.place(NOWHERE, set())).replica.url for _ in range(64)}
        assert urls == {A, B}

    asyncio.run(run())


def test_what_only_one_replica_has_is_asked_of_no_other() -> None:
    async def run() -> None:
        handle = Handle(A, B)
        state = await registered(handle)
        home = (await state.place(PROMPT, set())).replica
        handle.full = (A,)
        assert (await state.place_at(home)).replica is home
        handle.urls = [A]
        with pytest.raises(ApiError) as refused:
            await state.place_at(home)
        assert refused.value.status == 503

    asyncio.run(run())


@pytest.mark.parametrize(
    ("failures", "status"),
    [
        ((ActorUnavailableError("gone", None),), 200),
        ((ActorUnavailableError("gone", None),) * 3, 503),
        ((BackPressureError(num_queued_requests=9, max_queued_requests=9),), 429),
    ],
)
def test_a_lease_that_fails_is_asked_for_again_unless_too_many_wait(
    failures: tuple[Exception, ...], status: int
) -> None:
    async def run() -> int:
        try:
            await state_of(Handle(A, failures=failures)).place(NOWHERE, set())
        except ApiError as error:
            return error.status
        return 200

    assert asyncio.run(run()) == status
