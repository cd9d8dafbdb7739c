"""An OpenTelemetry collector that keeps what it gets."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """Takes what is exported to it."""

    def __init__(self) -> None:
        collector = self
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.status = 200

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.paths.append(self.path)
                collector.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response_only(collector.status)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for body in self.bodies
            for resource in body["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
