"""An OpenAI-compatible server under test: what it is asked, and what its streams say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import httptools
import msgspec

from quire.loadtest.client.http_client import HttpClient
from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session, Turn

Api = Literal["completions", "chat"]
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

    def client(self, api_key: str = "") -> HttpClient:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return HttpClient(self.base_url, headers, self.timeout)

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


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """One stream, event by event, as it comes."""

    def __init__(self, record: Record, start: float) -> None:
        self.text: list[str] = []  # of the first choice
        self.error: Any = None
        self.done = False
        self._record = record
        self._start = start
        self._rest = b""
        self._begun: dict[int, float] = {}  # by choice: when its latest chunk came

    def feed(self, body: bytes, now: float) -> None:
        """Take lines of an event stream; a piece may end anywhere."""
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                self.done = True
            elif data:
                self._take(_decode(data), now - self._start)

    def _take(self, event: _Event, now: float) -> None:
        record = self._record
        if event.error is not None:
            self.error = event.error
        if event.usage is not None:
            record.prompt_tokens = event.usage.prompt_tokens
            record.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                record.cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
        for choice in event.choices:
            if choice.index == 0:
                self.text.append(_text(choice))
            if not _brings_token(choice):
                continue
            if choice.index not in self._begun:
                record.first = record.first or now
            elif choice.token_ids or _text(choice) or choice.finish_reason is None:
                record.gaps.append(now - self._begun[choice.index])
            self._begun[choice.index] = record.last = now

    @property
    def sequences(self) -> int:
        return max(len(self._begun), 1)


def _brings_token(choice: _Choice) -> bool:
    """Say whether a choice brings a token: by its token ids if it has some.

    Else a token may have no text, and the last one may come with the end; chat may begin with a role alone.
    """
    if choice.token_ids is not None:
        return bool(choice.token_ids)
    if _text(choice) or choice.finish_reason is not None:
        return True
    if choice.delta is None:
        return choice.text is not None
    return choice.delta.role is None and choice.delta.content is not None


def _text(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    return choice.delta.content or choice.delta.reasoning_content or ""


async def ask(
    client: HttpClient,
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
        status, refusal = await client.post(PATHS[target.api], body, answer.feed)
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
        record.failure, record.detail = "protocol", "the answer is no event stream that ends with [DONE]"
    elif record.output_tokens == 0 or not record.first:
        record.failure, record.detail = "no tokens", "the stream brought no token, or no usage"
    elif target.ignore_eos and not turn.beam_width and record.output_tokens != asked:
        record.failure = "wrong length"
        record.detail = f"{asked} tokens were asked for, {record.output_tokens} came"
