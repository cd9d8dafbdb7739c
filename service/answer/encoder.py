"""The events of a stream: everything but the text is put together once, not for every token."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from quire.service.answer.choice import Choice, LogprobEntry
from quire.service.answer.generation import Generation
from quire.service.answer.replies import Usage, UsageInStream
from quire.service.errors import ApiError
from quire.service.http.framing import Framing

DONE = b"[DONE]"

_encode = msgspec.json.Encoder().encode


def json_string(text: str) -> bytes:
    """Return it as JSON. Short texts come again and again: each is encoded once."""
    return _short_string(text) if len(text) <= 32 else _encode(text)


@lru_cache(maxsize=1 << 16)
def _short_string(text: str) -> bytes:
    return _encode(text)


class EventEncoder(Protocol):
    """The events of a stream, each framed as a message."""

    def chunk(self, choice: Choice) -> list[bytes]:
        """Return what has come for `choice` and is not yet sent; nothing if none of it can be shown."""
        ...

    def end(self) -> list[bytes]:
        """Return what follows when every choice has finished."""
        ...

    def failure(self, error: ApiError) -> list[bytes]:
        """Return what ends a stream that has begun and cannot go on."""
        ...


@dataclass(frozen=True)
class Identity:
    """The fields that a reply and every chunk of a stream repeat."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Identity:
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model)


@dataclass(frozen=True)
class ChunkStyle:
    """The difference between completions and chat. The text goes between `before` and `after`."""

    object: str
    first: bytes  # before the text of a choice's first chunk
    before: bytes
    after: bytes
    logprobs: Callable[[Generation, list[LogprobEntry]], Any]


class ChunkEncoder:
    """The EventEncoder of completions and chat."""

    def __init__(
        self,
        style: ChunkStyle,
        generation: Generation,
        identity: Identity,
        framing: Framing,
        *,
        usage: UsageInStream,
        logprobs: bool,
    ) -> None:
        self._style = style
        self._generation = generation
        self._token_ids = generation.options.token_ids
        self._usage = usage
        self._logprobs = logprobs
        self._extras = logprobs or self._token_ids or usage == "each chunk"
        head = _encode(
            {"object": style.object, "id": identity.id, "created": identity.created, "model": identity.model}
        )[:-1]
        self._framing = framing
        self._head = framing.before + head + b',"choices":['
        self._tail = (b"]}" if usage == "nowhere" else b'],"usage":null}') + framing.after
        self._plain_tail = style.after + b',"logprobs":null,"finish_reason":null}' + self._tail
        self._before: dict[int, bytes] = {}  # by choice, from its first chunk on
        self._groups = {choice.index: group for group in generation.groups for choice in group.choices}

    def chunk(self, choice: Choice) -> list[bytes]:
        finish = choice.finish_reason
        extras = self._extras
        if not choice.texts and not choice.parts and finish is None and not (extras and choice.tokens):
            return []
        before = self._before.get(choice.index)
        first = before is None
        if before is None:
            before = self._open(choice.index)
        if choice.parts is None:
            text = json_string(choice.take_text())
        else:
            said, thought, calls = choice.parts.take_apart()
            text = json_string(said) if said or not (thought or calls) else b"null"
            if thought:
                thinking = json_string(thought)
                text += b',"reasoning":' + thinking + b',"reasoning_content":' + thinking
            if calls:
                text += b',"tool_calls":' + _encode(calls)
        if finish is None and not extras:
            return [before + text + self._plain_tail]
        parts = [before, text, self._style.after, b',"logprobs":']
        entries = choice.take_logprobs()
        parts.append(_encode(self._style.logprobs(self._generation, entries)) if self._logprobs else b"null")
        parts += [b',"finish_reason":', _encode(finish)]
        if choice.stop_reason is not None:
            parts += [b',"stop_reason":', _encode(choice.stop_reason)]
        if choice.cumulative_logprob is not None:
            parts += [b',"cumulative_logprob":', _encode(choice.cumulative_logprob)]
        tokens = choice.take_tokens()
        if self._token_ids:
            parts += [b',"token_ids":', _encode(tokens)]
            if first:
                parts += [b',"prompt_token_ids":', _encode(self._groups[choice.index].prompt.tokens)]
        parts.append(b"}")
        parts.append(self._tail_with(self._usage_of(choice)) if self._usage == "each chunk" else self._tail)
        return [b"".join(parts)]

    def _usage_of(self, choice: Choice) -> Usage:
        """Return its usage so far.

        That of all choices would take longer the more there are, for each of their chunks.
        """
        group = self._groups[choice.index]
        return Usage.of(
            len(group.prompt.tokens), choice.num_tokens, group.cached_tokens, choice.num_reasoning
        )

    def _open(self, index: int) -> bytes:
        start = self._head + b'{"index":%d,' % index
        self._before[index] = start + self._style.before
        return start + self._style.first

    def end(self) -> list[bytes]:
        done = self._framing.message(DONE)
        if self._usage == "nowhere":
            return [done]
        return [self._head + self._tail_with(self._generation.usage()), done]

    def failure(self, error: ApiError) -> list[bytes]:
        return [self._framing.message(error.body())]

    def _tail_with(self, usage: Usage) -> bytes:
        return b'],"usage":' + _encode(usage) + b"}" + self._framing.after
