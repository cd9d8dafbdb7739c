"""The real server on a real port, in a thread of this process, around an engine without a model."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from quire.engine.models.pooling import Pooling
from quire.service.config import ServiceConfig
from quire.service.server import QuireServer
from quire.service.text.tokenizer import Tokenizer
from tests.server_thread import ServerThread
from tests.service.fake_engine import FakeEngine, Script, echo, make_info


class Live(ServerThread):
    server: QuireServer

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        auto: bool = True,
        script: Script = echo,
        pooling: Pooling | None = None,
        **config: Any,
    ) -> None:
        self.engine: FakeEngine

        async def start_engine() -> FakeEngine:
            self.engine = FakeEngine(make_info(tokenizer, pooling), auto=auto, script=script).become_ready()
            return self.engine

        settings = ServiceConfig(served_model_names=("tiny",), port=0, **config)
        server = QuireServer(settings, start_engine, lambda: tokenizer)
        super().__init__(server, lambda: server.state.ready)

    def idle(self, seconds: float) -> None:
        """Lets so much of the server's time go by."""
        over = threading.Event()
        self.call(lambda: asyncio.get_running_loop().call_later(seconds, over.set))
        assert over.wait(10)
