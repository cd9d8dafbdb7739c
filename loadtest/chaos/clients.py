"""Clients that ask, read, leave, and note how each answer ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from quire.loadtest.chaos import traffic
from quire.loadtest.chaos.traffic import SOCKET_RESPONSES, Answer, Ask
from quire.loadtest.client.http_client import HttpClient

TIMEOUT = 60.0  # seconds, after which an answer has no end
SOCKET_ENDS = frozenset(f"response.{end}" for end in ("completed", "incomplete", "failed", "cancelled"))
PAUSE = 0.1  # seconds between a broken connection and the next


@dataclass
class Outcome:
    """The outcome of one answer. Times are seconds of `time.monotonic`."""

    number: int
    kind: str
    began: float
    ended: float = 0.0
    ends: int = 0  # terminal events, or a status without a stream
    end: str = "none"  # done, left, none, or what went wrong
    text: str = ""
    expected: Answer | None = None

    @property
    def is_good(self) -> bool:
        return self.end in ("done", "left")


class _Left(Exception):
    """The client goes."""


@dataclass
class EventStream:
    """One answer's events, as they come; a piece may end anywhere."""

    outcome: Outcome
    texts: list[str] = field(default_factory=list)
    finished: int = 0  # choices
    last_id: str | None = None
    events: int = 0
    break_at: int | None = None
    rest: bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        *blocks, self.rest = (self.rest + data).split(b"\n\n")
        for block in blocks:
            self._take(block)
            if self.break_at is not None and self.events >= self.break_at and not self.outcome.ends:
                raise _Left

    def _take(self, block: bytes) -> None:
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
        if b"data" not in fields:
            return
        self.events += 1
        if b"id" in fields:
            self.last_id = fields[b"id"].decode()
        if fields[b"data"] == b"[DONE]":
            self._end("done")
        else:
            self._read(json.loads(fields[b"data"]))

    def _read(self, event: dict[str, Any]) -> None:
        if "error" in event and event["error"] is not None and "type" not in event:
            self._end(f"error: {event['error'].get('code')}")
        kind = event.get("type", "")
        if kind == "error":
            self._end(f"error: {(event.get('error') or event).get('code')}")
        elif kind == "response.output_text.delta":
            self.texts.append(event["delta"])
        elif kind in SOCKET_ENDS:
            failed = kind == "response.failed"
            self._end(f"error: {_code(event['response'])}" if failed else "done")
        for choice in event.get("choices", ()):
            self.finished += choice["finish_reason"] is not None
            if choice["index"] == 0:
                self.texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")

    def _end(self, end: str) -> None:
        self.outcome.ends += 1
        self.outcome.end = end
        self.outcome.ended = time.monotonic()


def _code(response: dict[str, Any]) -> str:
    return str((response.get("error") or {}).get("code"))


class Clients:
    """All that ask one server, each by the key."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._authorization = {"Authorization": f"Bearer {key}"}
        self._http = HttpClient(url, self._authorization, TIMEOUT)

    def close(self) -> None:
        self._http.close()

    async def perform(self, ask: Ask) -> list[Outcome]:
        """Ask, and return what came of it; raise nothing that a server may cause."""
        if ask.kind == "socket":
            return await self._converse(ask)
        outcome = Outcome(ask.number, ask.kind, time.monotonic(), expected=ask.answer)
        try:
            async with asyncio.timeout(ask.leaves_after) as leaving:
                await self._ask(ask, outcome)
        except TimeoutError:
            outcome.end = "left" if leaving.expired() else "no end came"
        if ask.leaves_after is not None and leaving.expired() and not outcome.ends:
            outcome.end = "left"
        outcome.ended = outcome.ended or time.monotonic()
        return [outcome]

    async def _ask(self, ask: Ask, outcome: Outcome) -> None:
        path, fields = traffic.body(ask)
        stream = EventStream(outcome)
        data = json.dumps(fields).encode()
        if not fields.get("stream"):
            whole: list[bytes] = []
            status = await _tried(outcome, self._http.post(path, data, lambda part, _: whole.append(part)))
            if status == 200:
                outcome.ends, outcome.end = 1, "done"
                outcome.text = json.loads(b"".join(whole))["choices"][0]["text"]
            return
        if ask.kind == "resumed":
            await self._resume(ask, outcome, stream, path, data)
        else:
            await _tried(outcome, self._http.post(path, data, stream.feed))
        outcome.text = "".join(stream.texts)

    async def _resume(self, ask: Ask, outcome: Outcome, stream: EventStream, path: str, data: bytes) -> None:
        """Break off as often as was drawn, and pick the stream up where it was."""
        name = f"chaos-{ask.seed}-{ask.number}"
        breaks = list(ask.breaks)
        stream.break_at = breaks.pop()
        sending = self._http.post(path, data, stream.feed, {"X-Stream-Id": name})
        while True:
            try:
                await _tried(outcome, sending)
                return
            except _Left:
                await asyncio.sleep(PAUSE)
                stream.rest = b""
                stream.break_at = stream.events + breaks.pop() if breaks else None
                last = {} if stream.last_id is None else {"Last-Event-ID": stream.last_id}
                sending = self._http.follow(f"/v1/streams/{name}", stream.feed, last)

    async def _converse(self, ask: Ask) -> list[Outcome]:
        """Ask for several responses at once on one socket."""
        now = time.monotonic()
        outcomes = [Outcome(ask.number, "socket", now, expected=ask.answer) for _ in range(SOCKET_RESPONSES)]
        address = f"ws{self._url.removeprefix('http')}/v1/responses"
        try:
            async with (
                asyncio.timeout(TIMEOUT if ask.leaves_after is None else ask.leaves_after) as leaving,
                connect(address, additional_headers=self._authorization, open_timeout=TIMEOUT) as socket,
            ):
                for lane in range(SOCKET_RESPONSES):
                    create = traffic.response(ask.prompt, ask.tokens) | {"stream_id": str(lane)}
                    await socket.send(json.dumps({"type": "response.create", **create}))
                await _read_socket(socket, outcomes)
        except TimeoutError:
            end = "left" if leaving.expired() and ask.leaves_after is not None else "no end came"
            _end_open(outcomes, end)
        except ConnectionClosed as closed:
            _end_open(outcomes, f"closed: {closed.rcvd.code if closed.rcvd else 'cut off'}")
        except (InvalidHandshake, OSError) as error:
            _end_open(outcomes, f"refused: {error}")
        return outcomes


async def _read_socket(socket: ClientConnection, outcomes: list[Outcome]) -> None:
    """Read until each has ended. An event that names no stream ends all that have not."""
    streams = [EventStream(outcome) for outcome in outcomes]
    lanes: dict[str, int] = {}  # by response
    while any(not outcome.ends for outcome in outcomes):
        event = json.loads(await socket.recv())
        response = event.get("response_id") or event.get("response", {}).get("id")
        if "stream_id" in event and response:
            lanes[response] = int(event["stream_id"])
        lane = int(event["stream_id"]) if "stream_id" in event else lanes.get(response)
        if lane is None:
            code = (event.get("error") or {}).get("code")
            _end_open(outcomes, f"error: {code}", ends=1)
            return
        streams[lane]._read(event)
        outcomes[lane].text = "".join(streams[lane].texts)


def _end_open(outcomes: list[Outcome], end: str, ends: int = 0) -> None:
    for outcome in outcomes:
        if not outcome.ends:
            outcome.end, outcome.ends, outcome.ended = end, ends, time.monotonic()


async def _tried(outcome: Outcome, sending: Any) -> int:
    """Return the status, or 0; what is not 200 ends the answer."""
    try:
        status, refusal = await sending
    except (OSError, httptools.HttpParserError, json.JSONDecodeError) as error:
        if isinstance(error, TimeoutError):
            raise
        if not outcome.ends:
            outcome.end = f"cut off: {error or type(error).__name__}"
        return 0
    if status not in (200, 204):
        outcome.ends += 1
        outcome.end = f"{status}: {_reason(refusal)}"
    return int(status)


def _reason(refusal: bytes) -> str:
    try:
        return str(json.loads(refusal)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return refusal[:80].decode(errors="replace")


async def answer_alone(url: str, key: str, answer: Answer, title: str) -> str:
    """Return the greedy text of a server that does nothing else. Raise RuntimeError if it refuses."""
    how, prompt, tokens = answer
    made: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
        "text": lambda: ("/v1/completions", traffic.completion(prompt, tokens)),
        "chat": lambda: ("/v1/chat/completions", traffic.chat(prompt, tokens)),
        "grammar": lambda: ("/v1/chat/completions", traffic.constrained(prompt, tokens, title)),
    }
    path, fields = made[how]()
    client = HttpClient(url, {"Authorization": f"Bearer {key}"}, TIMEOUT)
    parts: list[bytes] = []
    try:
        status, refusal = await client.post(
            path, json.dumps(fields).encode(), lambda part, _: parts.append(part)
        )
    finally:
        client.close()
    if status != 200:
        raise RuntimeError(f"{url}{path} answered {status} to a lone request: {refusal[:300]!r}")
    choice = json.loads(b"".join(parts))["choices"][0]
    return str(choice["text"] if how == "text" else choice["message"]["content"])
