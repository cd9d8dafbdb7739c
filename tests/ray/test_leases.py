"""What Ray is told of a request that does not come by way of its actors, and the app under its proxy."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from quire.ray.leases import HEADER, Leases
from quire.ray.outside import Outside
from quire.ray.wish import Blocks, Wish


def scope_of(path: str, **headers: bytes) -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(name.replace("_", "-").encode(), value) for name, value in headers.items()],
    }


class Client:
    """Says nothing more after its messages, and keeps what it is sent."""

    def __init__(self, *messages: Message) -> None:
        self.sent: list[Message] = []
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        for message in messages:
            self.inbox.put_nowait(message)

    async def receive(self) -> Message:
        return await self.inbox.get()

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def test_a_lease_lasts_until_its_request_is_answered_and_opens_once() -> None:
    async def run() -> None:
        answered = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await answered.wait()

        leases, client = Leases(app), Client()
        with leases.lent() as lease:
            waiting = asyncio.create_task(leases.wait(lease))
            scope = scope_of("/v1/completions", **{HEADER.decode(): lease.token})
            request = asyncio.create_task(leases(scope, client.receive, client.send))
            await asyncio.sleep(0)
            assert not waiting.done()
            await leases(scope, client.receive, client.send)
            assert client.sent[0]["status"] == 403
            answered.set()
            await request
            await waiting

    asyncio.run(run())


def test_a_lease_whose_call_is_given_up_lets_nobody_in() -> None:
    """As when Ray drops the call before it goes on from what it has yielded."""

    async def run() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            raise AssertionError("nobody has a lease")

        leases, client = Leases(app), Client()
        with leases.lent() as lease:
            pass
        scope = scope_of("/v1/completions", **{HEADER.decode(): lease.token})
        await leases(scope, client.receive, client.send)
        assert client.sent[0]["status"] == 403

    asyncio.run(run())


def test_without_a_lease_only_probes_get_in() -> None:
    async def run() -> None:
        asked: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            asked.append(scope["path"])

        client = Client()
        for path in ("/health", "/v1/models", "/ready", "/metrics", "/v1/completions"):
            await Leases(app)(scope_of(path), client.receive, client.send)
        assert asked == ["/health", "/ready", "/metrics"]

    asyncio.run(run())


def test_the_app_hears_that_its_client_is_gone_while_it_answers() -> None:
    async def run() -> None:
        got: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            got.append(await receive())
            await scope["state"]["gone"]

        client = Client({"type": "http.request", "body": b"{}"})
        request = asyncio.create_task(Outside(app)(scope_of("/"), client.receive, client.send))
        await asyncio.sleep(0)
        assert not request.done()
        client.inbox.put_nowait({"type": "http.disconnect"})
        await request
        assert got == [{"type": "http.request", "body": b"{}"}]

    asyncio.run(run())


def test_a_wish_is_asked_in_its_own_loop_and_stays_in_its_process() -> None:
    async def run() -> None:
        loops: list[Any] = []

        def rank(blocks: Blocks) -> list[list[str]]:
            loops.append(asyncio.get_running_loop())
            return [list(blocks)[1:], list(blocks)]

        wish = Wish(rank)
        other = await asyncio.to_thread(lambda: asyncio.run(wish.rank({"a": 1, "b": 1})))
        assert other == [["b"], ["a", "b"]]
        assert loops == [asyncio.get_running_loop()]
        assert pickle.loads(pickle.dumps(wish)) == ""

    asyncio.run(run())
