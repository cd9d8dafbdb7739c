"""A message as its events, and as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from quire.service.answer.choice import Choice
from quire.service.answer.generation import Generation
from quire.service.api.anthropic.replies import (
    AnthropicUsage,
    MessageReply,
    Said,
    SaidCall,
    SaidText,
    SaidThinking,
    stop_reason,
    stop_sequence,
)
from quire.service.errors import ApiError
from quire.service.http.dialects import ANTHROPIC
from quire.service.http.framing import Framing
from quire.service.text.pieces import Thought
from quire.service.text.tools.calls import CallDelta, Part, object_of

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class MessageAnswer:
    """A message of the model's while it is generated."""

    id: str
    model: str
    generation: Generation
    fills_context: bool  # it may have all the room that there is
    shows_thinking: bool

    @property
    def choice(self) -> Choice:
        return self.generation.choices[0]

    def begun(self) -> MessageReply:
        """Return what is known with the first token."""
        return MessageReply(
            id=self.id,
            model=self.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=AnthropicUsage.of(self.generation),
        )

    def whole(self) -> MessageReply:
        """Return the message once its generation has finished.

        A call whose arguments are no JSON object, as where it was cut, has none: nobody takes them for
        whole.
        """
        reply, called = self.begun(), False
        for part in self.choice.take_parts():
            if isinstance(part, str):
                if text := part if not reply.content else part.lstrip():
                    reply.content.append(SaidText(text=text))
            elif isinstance(part, Thought):
                if self.shows_thinking:
                    reply.content.append(SaidThinking(thinking=part.text))
            elif part.id is not UNSET and part.function.name is not UNSET:
                given = object_of(part.function.arguments)
                called = called or given is not None
                reply.content.append(SaidCall(id=part.id, name=part.function.name, input=given or {}))
        reply.stop_reason = stop_reason(self.choice, fills_context=self.fills_context, called=called)
        reply.stop_sequence = stop_sequence(self.choice)
        return reply


class MessageEncoder:
    """The EventEncoder of a message's stream."""

    def __init__(self, message: MessageAnswer, framing: Framing) -> None:
        self._message = message
        self._framing = framing
        self._started = False
        self._index = -1  # of the latest block
        self._open: type[Said] | None = None
        self._arguments: list[str] = []  # of the call that is open
        self._called = False  # a call's arguments were whole
        self._pinged = False

    def chunk(self, choice: Choice) -> list[bytes]:
        return [*self._start(), *(event for part in choice.take_parts() for event in self._tell(part))]

    def end(self) -> list[bytes]:
        message = self._message
        before = [*self._start(), *self._close()]
        reason = stop_reason(message.choice, fills_context=message.fills_context, called=self._called)
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence(message.choice)}
        usage = AnthropicUsage.of(message.generation)
        return [
            *before,
            self._event("message_delta", delta=delta, usage=usage),
            self._event("message_stop"),
        ]

    def failure(self, error: ApiError) -> list[bytes]:
        return [self._framing.message(ANTHROPIC.body(error), ANTHROPIC.error_name)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        return self._framing.message(_encode({"type": kind, **fields}), kind)

    def _start(self) -> Iterator[bytes]:
        if not self._started:
            self._started = True
            yield self._event("message_start", message=self._message.begun())

    def _tell(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, CallDelta):
            if part.id is not UNSET and part.function.name is not UNSET:
                yield from self._begin(SaidCall(id=part.id, name=part.function.name, input={}))
            if part.function.arguments:
                self._arguments.append(part.function.arguments)
                yield self._delta("input_json_delta", partial_json=part.function.arguments)
            return
        if isinstance(part, Thought):
            if not self._message.shows_thinking:
                yield from self._close()  # what follows is a block of its own, as in a whole message
                return
            if self._open is not SaidThinking:
                yield from self._begin(SaidThinking(thinking=""))
            yield self._delta("thinking_delta", thinking=part.text)
            return
        if self._open is not SaidText:
            part = part.lstrip() if self._index >= 0 else part  # white space after calls is no text
            if part:
                yield from self._begin(SaidText(text=""))
        if part:
            yield self._delta("text_delta", text=part)

    def _begin(self, block: Said) -> Iterator[bytes]:
        yield from self._close()
        self._open = type(block)
        self._index += 1
        yield self._event("content_block_start", index=self._index, content_block=block)
        if not self._pinged:
            self._pinged = True
            yield self._event("ping")

    def _delta(self, kind: str, **fields: str) -> bytes:
        return self._event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            if self._open is SaidCall:
                self._called = self._called or object_of("".join(self._arguments)) is not None
                self._arguments = []
            self._open = None
            yield self._event("content_block_stop", index=self._index)
