"""A proxy that keeps the requests that clients send, as tests/service/recorded has them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

# of one hop, or private
LEFT_OUT = {"host", "connection", "content-length", "accept-encoding", "authorization", "x-api-key", "cookie"}


class Recorder:
    """Each POST becomes a file N.json of its body, and an entry of requests.json."""

    def __init__(self, upstream: str, folder: Path, private: dict[str, str]) -> None:
        """private: texts, and what stands for them in what is kept."""
        self._folder = folder
        self._private = {name.encode(): other.encode() for name, other in private.items()}
        self._requests: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._pass_on(b"")

            def do_HEAD(self) -> None:
                self._pass_on(b"")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                recorder.keep(self.path, dict(self.headers.items()), body)
                self._pass_on(body)

            def _pass_on(self, body: bytes) -> None:
                headers = {name: text for name, text in self.headers.items() if name.lower() != "host"}
                headers["accept-encoding"] = "identity"
                url = upstream + self.path
                with httpx.stream(
                    self.command, url, headers=headers, content=body or None, timeout=60
                ) as reply:
                    self.send_response(reply.status_code)
                    for name, text in reply.headers.items():
                        if name not in ("transfer-encoding", "connection"):
                            self.send_header(name, text)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    for chunk in reply.iter_raw():
                        self.wfile.write(chunk)
                        self.wfile.flush()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def keep(self, path: str, headers: dict[str, str], body: bytes) -> None:
        with self._lock:
            name = f"{len(self._requests) + 1}.json"
            kept = {key.lower(): text for key, text in headers.items() if key.lower() not in LEFT_OUT}
            self._requests.append({"path": path, "headers": kept, "body": name})
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_bytes(self._without_private(body))
            index = json.dumps(self._requests, indent=1).encode() + b"\n"
            (self._folder / "requests.json").write_bytes(self._without_private(index))

    def _without_private(self, text: bytes) -> bytes:
        for name, other in self._private.items():
            text = text.replace(name, other)
        return text

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
