"""An OpenAI-compatible server under test: what it is asked, and what its streams say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import httptools
import msgspec

from quire.loadtest.client.answer import Answer
from quire.loadtest.client.http_client import HttpClient
from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session, Turn
from quire.loadtest.client.transports import EventStreams, Sockets, Transport

Api = Literal["completions", "chat"]
TransportName = Literal["sse", "websocket"]
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and what every request to it has in common."""

    base_url: str  # without /v1
    model: str
    api: Api = "completions"
    ignore_eos: bool = True  # an extension that vLLM, SGLang and Quire share: the work is fixed
    token_ids: bool = False  # one of vLLM's and Quire's: tokens that have no text are told of when they come
    extra_body: dict[str, Any] = {}  # more fields of each request, as the server knows them
    timeout: float = 600.0  # seconds that a request may take
    transport: TransportName = "sse"  # of answers; websocket is Quire's own

    def client(self, api_key: str = "") -> HttpClient:
        return HttpClient(self.base_url, _headers(api_key), self.timeout)

    def open_transport(self, api_key: str = "") -> Transport:
        """Return the way by which answers come."""
        if self.transport == "websocket":
            return Sockets(self.base_url, _headers(api_key), self.timeout)
        return EventStreams(self.client(api_key))

    def salted(self, salt: str) -> Target:
        """Return the same, but what others left in the prefix cache is of no use to it (vLLM, Quire)."""
        return msgspec.structs.replace(self, extra_body={**self.extra_body, "cache_salt": salt})

    def check(self, session: Session) -> None:
        """Raise ValueError if the session cannot be sent."""
        are_text = all(isinstance(turn.prompt, str) for turn in session.turns)
        if self.api == "chat" and not are_text:
            raise ValueError("the chat API takes text; have the prompts made of text (--text)")
        if len(session.turns) > 1 and not are_text:
            raise ValueError("a session of several turns needs text prompts: its answers are text")

    def body(self, turn: Turn, history: list[str]) -> bytes:
        """Return the request for `turn`; `history`: what user and assistant have said before, in turn."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": turn.output_len, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        if self.api == "chat":
            roles = ("user", "assistant")
            fields["messages"] = [
                {"role": roles[i % 2], "content": text} for i, text in enumerate([*history, turn.prompt])
            ]
        else:
            fields["prompt"] = "\n".join([*history, str(turn.prompt)]) if history else turn.prompt
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.token_ids:
            fields["return_token_ids"] = True
        if turn.beam_width:
            fields |= {"use_beam_search": True, "best_of": turn.beam_width, "n": turn.n}
        else:
            default = 0.0 if turn.n == 1 else 1.0
            fields["temperature"] = default if turn.temperature is None else turn.temperature
            if turn.n > 1:
                fields["n"] = turn.n
        if turn.seed is not None:
            fields["seed"] = turn.seed
        return msgspec.json.encode(fields | self.extra_body)


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def first_model(target: Target, api_key: str) -> str:
    """Return the name of the first model that the server lists. Raises ValueError."""
    client = target.client(api_key)
    try:
        status, body = await client.get("/v1/models")
    except (OSError, httptools.HttpParserError) as error:
        raise ValueError(f"no HTTP server answers at {target.base_url}: {error}") from error
    finally:
        client.close()
    if status != 200:
        raise ValueError(f"{target.base_url}/v1/models answered {status}; give --model (and --api-key-env)")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{target.base_url}/v1/models lists no model; give --model, or another --url (without /v1)"
        ) from error


async def ask(
    transport: Transport,
    target: Target,
    turn: Turn,
    history: list[str],
    record: Record,
    start: float,
    clock: Callable[[], float],
) -> str:
    """Make one request, fill in `record`, and return the text of the answer. No failure is raised."""
    answer = Answer(record, start)
    body = target.body(turn, history)
    record.sent = clock() - start
    try:
        status, refusal = await transport.ask(PATHS[target.api], body, answer)
    except TimeoutError:
        record.failure, record.detail = "timeout", f"no end after {target.timeout:g} s"
    except httptools.HttpParserError as error:
        record.failure, record.detail = "protocol", str(error)
    except msgspec.DecodeError as error:
        record.failure, record.detail = "protocol", str(error)
    except OSError as error:
        record.failure = "disconnected" if record.first else "connection"
        record.detail = str(error) or type(error).__name__
    else:
        _judge(record, answer, status, refusal, turn, target)
    record.sequences = answer.sequences
    return "".join(answer.text)


def _judge(record: Record, answer: Answer, status: int, refusal: bytes, turn: Turn, target: Target) -> None:
    """Note in `record` whether what came is what was asked for."""
    asked = turn.output_len * turn.n
    if status != 200:
        record.failure, record.detail = f"HTTP {status}", refusal[:300].decode(errors="replace")
    elif answer.error is not None:
        record.failure, record.detail = "stream error", str(answer.error)[:300]
    elif not answer.done:
        record.failure, record.detail = "protocol", "the answer does not end as a stream does"
    elif record.output_tokens == 0 or not record.first:
        record.failure, record.detail = "no tokens", "the stream brought no token, or no usage"
    elif target.ignore_eos and not turn.beam_width and record.output_tokens != asked:
        record.failure = "wrong length"
        record.detail = f"{asked} tokens were asked for, {record.output_tokens} came"
