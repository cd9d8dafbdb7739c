"""A server that looks like Quire to the chat page: its own files, and answers as told."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from quire.service.http.static import page_files

Script = Callable[[], AsyncIterator[str | bytes]]


async def opened(gate: threading.Event) -> None:
    """Waits for a gate that the test opens; a test that fails before that does not hold up the others."""
    await asyncio.to_thread(gate.wait, 10)


def event(data: object) -> str:
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"


def delta(text: str = "", finish_reason: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish_reason}
    return event({"object": "chat.completion.chunk", "choices": [choice], "usage": None})


def ending(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, reason: str = "stop") -> str:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return delta(finish_reason=reason) + event({"choices": [], "usage": usage}) + event("[DONE]")


def kv_metrics(active: int, cached: int, free: int) -> str:
    return (
        "# HELP quire_kv_blocks KV cache blocks.\n# TYPE quire_kv_blocks gauge\n"
        f'quire_kv_blocks{{tier="device",state="active"}} {active}.0\n'
        f'quire_kv_blocks{{state="cached",tier="device"}} {cached}.0\n'
        f'quire_kv_blocks{{tier="device",state="free"}} {free}.0\n'
        'quire_kv_blocks{tier="host",state="free"} 9999.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0\n'
    )


def api_error(status: int, message: str, code: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": code, "param": None, "code": code}}, status)


class StubServer:
    """Runs in a thread of its own. Everything that a test sets is put back by reset()."""

    def __init__(self) -> None:
        self.left = threading.Event()  # a client went away before its answer was complete
        self.reset()
        routes = [
            *(Route(path, partial(serve, None)) for path, serve in page_files()),
            Route("/startup", self._startup),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def reset(self) -> None:
        self.model = "quire-demo"
        self.api_key: str | None = None
        self.metrics = kv_metrics(12, 20, 32)
        self.phases: list[dict[str, object]] = [
            {"phase": "ready", "done": 1, "total": 1, "unit": "model", "seconds": 0.5}
        ]
        self.loaded = threading.Event()  # until it is set, /startup stops before its last phase
        self.loaded.set()
        self.scripts: list[Script | Response] = []  # one answer each; the last one serves every later request
        self.requests: list[dict[str, Any]] = []
        self.left.clear()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics)

    async def _startup(self, request: Request) -> Response:
        async def stream() -> AsyncIterator[str]:
            for phase in self.phases[:-1]:
                yield event(phase)
            await opened(self.loaded)
            yield event(self.phases[-1])

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _refuses(self, request: Request) -> Response | None:
        if self.api_key is None or request.headers.get("authorization") == f"Bearer {self.api_key}":
            return None
        return api_error(401, "The API key is missing or wrong.", "invalid_api_key")

    async def _models(self, request: Request) -> Response:
        model = {"id": self.model, "object": "model", "max_model_len": 2048}
        return self._refuses(request) or JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        if refusal := self._refuses(request):
            return refusal
        self.requests.append(await request.json())
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script, Response):
            return script

        async def stream() -> AsyncIterator[str | bytes]:
            complete = False
            try:
                async for piece in script():
                    yield piece
                complete = True
            finally:
                if not complete:
                    self.left.set()

        return StreamingResponse(stream(), media_type="text/event-stream")
