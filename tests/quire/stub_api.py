"""A server that speaks as much of OpenAI's API as a conversation needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWER = "# Blocks\n\nThey are **paged**.\n\n| a | b |\n| - | - |\n| 1 | 2 |\n"


class _Api(BaseHTTPRequestHandler):
    """Two words to every chat, but ANSWER to "markdown", and to "wait" a beginning and no end.

    An error in the stream to the temperature 2, and before it to another key than "secret".
    """

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != "Bearer secret":
            self._reply(401, {"error": {"message": "give a valid API key"}})
            return
        asked = body["messages"][-1]["content"]
        texts = [ANSWER] if asked == "markdown" else [f"{word} " for word in ("I", body["model"])]
        events: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
        if body.get("temperature") == 2:
            events[1:] = [{"error": {"message": "too hot"}}]
        self.send_response(200)
        self.end_headers()
        for event in map(json.dumps, events):
            self.wfile.write(f"data: {event}\n\n".encode())
        self.wfile.flush()
        if asked == "wait":
            self.rfile.read(1)  # until the client leaves
            return
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@contextmanager
def stub_api() -> Iterator[str]:
    """Yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
