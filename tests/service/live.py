"""The real server on a real port, in a thread of this process, around an engine without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from service.config import ServiceConfig
from service.server import QuireServer
from service.tokenizer import Tokenizer
from tests.service.fake_engine import FakeEngine, Script, echo, make_info


class Live:
    """A server in a thread of its own."""

    def __init__(
        self, tokenizer: Tokenizer, *, auto: bool = True, script: Script = echo, **config: Any
    ) -> None:
        self.engine: FakeEngine

        async def start_engine() -> FakeEngine:
            self.engine = FakeEngine(make_info(tokenizer), auto=auto, script=script).become_ready()
            return self.engine

        settings = ServiceConfig(served_model_names=("tiny",), port=0, **config)
        self.server = QuireServer(settings, start_engine, lambda: tokenizer)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.wait(lambda: self.server.started and self.server.state.ready)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def wait(self, condition: Callable[[], bool]) -> None:
        """Fails by the test's timeout if it never comes true."""
        tick = threading.Event()
        while not condition():
            assert self.thread.is_alive(), "the server ended"
            tick.wait(0.01)

    def idle(self, seconds: float) -> None:
        """Lets so much of the server's time go by."""
        over = threading.Event()
        self.call(lambda: asyncio.get_running_loop().call_later(seconds, over.set))
        assert over.wait(10)

    def call(self, function: Callable[[], object]) -> None:
        """In the server's loop."""
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        loop = self.server._loop
        assert loop is not None
        loop.call_soon_threadsafe(run)
        assert done.wait(10)

    def end(self) -> int:
        """Stops it at once, if it still runs. Returns the exit code."""
        if self.thread.is_alive():
            self.server.stop_soon()
            self.server.stop_soon()
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.server.exit_code
