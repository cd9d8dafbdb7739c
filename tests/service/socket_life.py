"""One socket through a series of events, against an engine that steps when told: what its tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from quire.service.app import create_app
from quire.service.config import ServiceConfig
from quire.service.errors import not_ready
from quire.service.state import ServerState
from quire.service.text.tokenizer import Tokenizer
from tests.service.asgi import settle
from tests.service.asgi_socket import Socket
from tests.service.fake_engine import FakeEngine, make_info
from tests.service.inline_renderer import InlineRenderer

ENDINGS = st.sampled_from([None, ("close",), ("drain",), ("die",)])


class SocketLife:
    def __init__(self, tokenizer: Tokenizer, path: str) -> None:
        self.state = ServerState(ServiceConfig(served_model_names=("tiny",), max_num_queued_reqs=3))
        self.state.renderer = InlineRenderer()
        self.engine = FakeEngine(make_info(tokenizer), auto=False)
        self.state.set_engine(self.engine)
        self.engine.become_ready()
        self.state.tokenizer = tokenizer
        self.socket = Socket(create_app(self.state), path).start()
        self.draining = False

    async def act(self, action: tuple[Any, ...]) -> None:
        """Do what sockets of every endpoint have in common; a subclass knows what is said on its own."""
        match action:
            case ("step", count):
                for _ in range(count):
                    self.engine.step()
            case ("wait", turns):
                for _ in range(turns):
                    await asyncio.sleep(0)
            case ("stall",):
                self.socket.readable.clear()
            case ("read",):
                self.socket.readable.set()
            case ("interrupt",):
                for each in list(self.state.generations):
                    each.interrupt(not_ready("the server is shutting down"))
            case ("drain",):
                self.draining = self.state.draining = True
                for stream in list(self.state.streams):
                    stream.interrupt(not_ready("the server is shutting down"))
            case ("die",):
                self.engine.die("gone")
            case ("close",):
                self.socket.leave()

    async def finish(self) -> None:
        """All that runs may end."""
        self.socket.readable.set()
        for _ in range(400):
            await asyncio.sleep(0)
            if self.engine.active:
                self.engine.step()
        await settle()

    def check(self) -> None:
        """Nothing is left of what was asked for."""
        assert not self.engine.active
        assert not self.state.generations
        assert self.state.queue.prompts == 0

    async def live(self, actions: Sequence[Any], ending: Any) -> None:
        """Go through the actions, let all that runs end, check, and leave."""
        await settle()  # the handshake
        for action in actions:
            await self.act(action)
        await self.finish()
        self.check()
        if ending == ("drain",):
            assert self.socket.close_code == 1001
        self.socket.leave()
        assert self.socket.task is not None
        await self.socket.task
        assert not self.state.streams


def lives(actions: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[tuple[list[Any], Any]]:
    """Draw up to `most` actions, maybe an ending and a few more behind it, and which ending it is."""
    return st.tuples(st.lists(actions, max_size=most), ENDINGS, st.lists(actions, max_size=4)).map(
        lambda drawn: ([*drawn[0], *([drawn[1]] if drawn[1] else []), *drawn[2]], drawn[1])
    )
