"""The block lab's API: a pool for each visitor, every operation a real one, bounded and forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quire.service.errors import ApiError
from quire.service.inspector.lab_pools import LabPools
from tests.service.asgi import Reply, post
from tests.service.conftest import Service

pytestmark = pytest.mark.anyio


class Visitor:
    """One pool of a service."""

    def __init__(self, service: Service, pool_id: str, **headers: str) -> None:
        self.service, self.id, self.headers = service, pool_id, headers

    @classmethod
    async def come(cls, service: Service, **headers: str) -> Visitor:
        reply = await post(service.app, "/v1/lab/pools", {}, **headers)
        assert reply.status == 200
        return cls(service, reply.json()["id"], **headers)

    async def ask(self, do: str, **fields: Any) -> Reply:
        return await post(self.service.app, f"/v1/lab/pools/{self.id}", {"do": do, **fields}, **self.headers)

    async def pool(self, do: str, **fields: Any) -> Any:
        reply = await self.ask(do, **fields)
        assert reply.status == 200, reply.body
        return reply.json()["pool"]


async def test_every_operation_runs_on_the_visitors_pool(service: Service) -> None:
    visitor = await Visitor.come(service)
    await visitor.pool("sequence", text="A")
    await visitor.pool("append", sequence=1, tokens=20)
    forked = await visitor.pool("fork", sequence=1)
    assert [each["block_table"] for each in forked["sequences"]] == [[0, 1], [0, 1]]
    written = await visitor.pool("write_last", sequence=2)
    assert written["copies"] == 1 and "BlockManager.copy_on_write" in [
        call["name"] for call in written["path"]
    ]
    out = await visitor.pool("swap_out", sequence=2)
    assert (out["used"], out["host_used"]) == (2, 2)
    await visitor.pool("swap_in", sequence=2)
    await visitor.pool("publish", sequence=1)
    freed = await visitor.pool("free", sequence=1)
    assert (freed["used"], freed["cached"]) == (2, 1)
    evicted = await visitor.pool("evict")
    assert (evicted["cached"], evicted["free"]) == (0, 62)


async def test_the_lessons_beams_take_8_blocks_and_12_from_17_tokens_on(service: Service) -> None:
    visitor = await Visitor.come(service)
    lesson = await visitor.pool("lesson")
    assert (lesson["used"], lesson["naive"]) == (8, 20)
    await visitor.pool("reset", block_size=16)
    assert (await visitor.pool("lesson", tokens=17))["used"] == 12


async def test_what_finds_no_block_is_a_conflict_and_changes_nothing(service: Service) -> None:
    visitor = await Visitor.come(service)
    await visitor.pool("sequence")
    before = await visitor.pool("append", sequence=1, tokens=1024)
    reply = await visitor.ask("append", sequence=1, tokens=1)
    assert reply.status == 409 and reply.error["code"] == "out_of_blocks"
    assert reply.error["message"].startswith("Nothing has changed: 1025 tokens are more than the 1024")
    after = await visitor.pool("sequence")
    assert after["sequences"][:1] == before["sequences"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"do": "append", "sequence": 1}, "tokens"),
        ({"do": "append", "sequence": 9, "tokens": 1}, "sequence"),
        ({"do": "fork", "sequence": 1, "tokens": 1}, "tokens"),
        ({"do": "write_last", "sequence": 1}, "sequence"),  # it has no token
        ({"do": "reset", "block_size": 65}, "block_size"),
        ({"do": "jump"}, "do"),
    ],
)
async def test_what_is_wrong_is_named(service: Service, body: dict[str, Any], param: str) -> None:
    visitor = await Visitor.come(service)
    await visitor.pool("sequence")
    reply = await post(service.app, f"/v1/lab/pools/{visitor.id}", body)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_pool_is_its_keys_alone_until_it_leaves(make_service: Callable[..., Service]) -> None:
    service = make_service(api_keys=("mine", "yours"))
    visitor = await Visitor.come(service, authorization="Bearer mine")
    other = Visitor(service, visitor.id, authorization="Bearer yours")
    assert (await other.ask("sequence")).status == 404
    await visitor.pool("leave")
    reply = await visitor.ask("sequence")
    assert (reply.status, reply.error["code"]) == (404, "pool_not_found")
    assert len(service.state.lab_pools) == 0


async def test_whoever_has_most_pools_makes_room() -> None:
    pools = LabPools(max_pools=3)
    mine, _ = pools.begin("me", 16)
    first, _ = pools.begin("greedy", 16)
    second, _ = pools.begin("greedy", 16)
    pools.begin("greedy", 16)
    for tenant, pool_id in (("me", mine), ("greedy", second)):
        pools.find(tenant, pool_id)
    with pytest.raises(ApiError):
        pools.find("greedy", first)
    pools.close()
    assert len(pools) == 0


async def test_an_idle_pool_is_forgotten() -> None:
    pools = LabPools(idle_seconds=0.0)
    pools.begin("me", 16)
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, over.set)  # after the pool's own timer
    await over.wait()
    assert len(pools) == 0
