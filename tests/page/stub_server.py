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
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quire.service.http.static import page_files

Script = Callable[[], AsyncIterator[str | bytes]]


async def opened(gate: threading.Event) -> None:
    """Waits for a gate that the test opens; a test that fails before that does not hold up the others."""
    await asyncio.to_thread(gate.wait, 10)


def event(data: object) -> str:
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"


def delta(text: str = "", finish_reason: str | None = None, index: int = 0, usage: object = None) -> str:
    choice = {"index": index, "delta": {"content": text} if text else {}, "finish_reason": finish_reason}
    return event({"object": "chat.completion.chunk", "choices": [choice], "usage": usage})


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def ending(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, reason: str = "stop") -> str:
    return delta(finish_reason=reason) + total(usage(prompt_tokens, completion_tokens, cached_tokens))


def total(used: dict[str, object]) -> str:
    """The end of a stream, with what all its choices used."""
    return event({"choices": [], "usage": used}) + event("[DONE]")


def block_counts(active: int, cached: int, free: int) -> dict[str, int]:
    return {"active": active, "cached": cached, "free": free, "block_size": 16}


def api_error(status: int, message: str, code: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": code, "param": None, "code": code}}, status)


class Recording:
    """An answer as the server keeps it: it is made whether or not somebody reads it."""

    def __init__(self, script: Script) -> None:
        self.events: list[tuple[str, bytes]] = []  # with their ids, of which the first part counts tokens
        self.ended = False
        self.abandoned = False  # the test that asked for it is over
        self._tokens = 0
        self._task = asyncio.create_task(self._run(script))

    async def _run(self, script: Script) -> None:
        async for piece in script():
            if self.abandoned:
                break
            if isinstance(piece, bytes):
                self.events.append(("", piece))
            else:
                for text in filter(None, piece.split("\n\n")):
                    self._add(f"{text}\n\n")
        self.ended = True

    def _add(self, text: str) -> None:
        self._tokens += '"content":' in text
        number = f"{self._tokens}.{len(self.events)}"
        self.events.append((number, f"id: {number}\n{text}".encode()))

    def stop(self) -> None:
        self._task.cancel()
        self._add(event({"error": {"message": "Stopped.", "code": "stream_stopped"}}))
        self.ended = True

    async def read(self, at: int, goes_on: Callable[[], bool]) -> AsyncIterator[bytes]:
        while goes_on():
            if at < len(self.events):
                yield self.events[at][1]
                at += 1
            elif self.ended:
                return
            else:
                await asyncio.sleep(0.005)


class StubServer:
    """Runs in a thread of its own. Everything that a test sets is put back by reset()."""

    def __init__(self) -> None:
        self.recordings: dict[str, Recording] = {}
        self.stopped = threading.Event()  # a client has stopped an answer
        self.watchers = 0  # so many watch the blocks now
        self.loading = 0  # so many read /startup now
        self.reset()
        routes = [
            *(Route(path, partial(serve, None)) for path, serve in page_files()),
            Route("/startup", self._startup),
            Route("/v1/blocks/events", self._blocks),
            Route("/v1/blocks/own", self._own_blocks),
            Route("/v1/models", self._models),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
            Route("/v1/completions", self._answer, methods=["POST"]),
            Route("/v1/requests/{request_id}/why", self._why),
            Route("/v1/streams/{stream_id}", self._stream, methods=["GET", "DELETE"]),
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
        self.blocks = block_counts(12, 20, 32)
        self.own = {"active": 0, "shared": 0, "cached": 0, "host": 0}  # blocks of whichever requests
        self.watches = 0  # whoever watches the blocks since there were fewer is cut off
        self.phases: list[dict[str, object]] = [
            {"phase": "ready", "done": 1, "total": 1, "unit": "model", "seconds": 0.5}
        ]
        self.loaded = threading.Event()  # until it is set, /startup stops before its last phase
        self.loaded.set()
        self.taken = threading.Event()  # until it is set, nothing becomes of a request for an answer
        self.taken.set()
        self.scripts: list[Script | Response] = []  # one answer each; the last one serves every later request
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []  # of the requests
        self.has_template = True
        for recording in self.recordings.values():
            recording.abandoned = True
        self.recordings = {}
        self.lines = 0  # whoever reads a stream since there were fewer has lost its line
        self.stopped.clear()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _blocks(self, request: Request) -> Response:
        async def stream() -> AsyncIterator[str]:
            watches = self.watches
            self.watchers += 1
            try:
                yield event(self.blocks)
                while True:
                    await asyncio.sleep(0.05)
                    if self.watches != watches:
                        return
            finally:
                self.watchers -= 1

        return self._refuses(request) or StreamingResponse(stream(), media_type="text/event-stream")

    async def _own_blocks(self, request: Request) -> Response:
        return self._refuses(request) or JSONResponse(self.own)

    async def _startup(self, request: Request) -> Response:
        async def stream() -> AsyncIterator[str]:
            self.loading += 1
            try:
                for phase in self.phases[:-1]:
                    yield event(phase)
                await opened(self.loaded)
                yield event(self.phases[-1])
            finally:
                self.loading -= 1

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _refuses(self, request: Request) -> Response | None:
        if self.api_key is None or request.headers.get("authorization") == f"Bearer {self.api_key}":
            return None
        return api_error(401, "The API key is missing or wrong.", "invalid_api_key")

    async def _models(self, request: Request) -> Response:
        model = {"id": self.model, "object": "model", "max_model_len": 2048}
        return self._refuses(request) or JSONResponse({"object": "list", "data": [model]})

    async def _tokenize(self, request: Request) -> Response:
        """A character is a token; so is all that a template makes of messages."""
        body = await request.json()
        if "prompt" in body:
            return JSONResponse({"tokens": [ord(character) for character in body["prompt"]]})
        if self.has_template:
            return JSONResponse({"tokens": [0]})
        return api_error(400, "The model has no chat template: use /v1/completions.", "no_chat_template")

    async def _answer(self, request: Request) -> Response:
        if refusal := self._refuses(request):
            return refusal
        self.requests.append(await request.json())
        self.paths.append(request.url.path)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script, Response):
            return script
        await opened(self.taken)
        recording = self.recordings[request.headers["x-stream-id"]] = Recording(script)
        return self._reader(recording, 0)

    async def _why(self, request: Request) -> Response:
        """As long as it has the recording."""
        if not self.recordings:
            return api_error(404, "There is no such request.", "request_not_found")
        spans = [{"name": "prefill", "ms": 12, "tokens": 21}, {"name": "decode", "ms": 400, "steps": 7}]
        causes = [{"kind": "prefix_cache", "text": "16 of 21 prompt tokens found in the cache"}]
        return JSONResponse({"total_ms": 412, "spans": spans, "causes": causes})

    async def _stream(self, request: Request) -> Response:
        recording = self.recordings.get(request.path_params["stream_id"])
        if recording is None:
            return api_error(404, "There is no such stream.", "stream_not_found")
        if request.method == "DELETE":
            recording.stop()
            self.stopped.set()
            return JSONResponse({"id": request.path_params["stream_id"], "stopped": True})
        last = request.headers.get("last-event-id")
        at = 0 if last is None else 1 + [each for each, _ in recording.events].index(last)
        if recording.ended and at == len(recording.events):
            return Response(status_code=204)
        return self._reader(recording, at)

    def _reader(self, recording: Recording, at: int) -> Response:
        line = self.lines
        events = recording.read(at, lambda: line == self.lines)
        headers = {"X-Request-Id": "request"}
        return StreamingResponse(events, headers=headers, media_type="text/event-stream")
