"""A server of ours on a real port, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.service.http.lifecycle import OrderlyServer


class ServerThread:
    """It runs from the start, and has its port once `ready` is true."""

    def __init__(self, server: OrderlyServer, ready: Callable[[], bool]) -> None:
        self.server = server
        self.thread = threading.Thread(target=server.run)
        self.thread.start()
        self.wait(lambda: server.started and ready())
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def wait(self, condition: Callable[[], bool]) -> None:
        """Fails by the test's timeout if it never comes true."""
        tick = threading.Event()
        while not condition():
            assert self.thread.is_alive(), "the server ended"
            tick.wait(0.01)

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
