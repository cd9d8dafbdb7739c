"""An answer as Ollama's objects, one a line, and as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from quire.service.answer.choice import Choice
from quire.service.answer.generation import Generation
from quire.service.answer.replies import TokenLogprobs
from quire.service.api.chat import logprobs_of
from quire.service.api.ollama.replies import (
    OllamaCalled,
    OllamaChatReply,
    OllamaGenerateReply,
    OllamaSaid,
    OllamaToolCall,
    now,
)
from quire.service.errors import ApiError
from quire.service.http.dialects import OLLAMA
from quire.service.http.framing import Framing
from quire.service.text.pieces import Thought
from quire.service.text.tools.calls import CallDelta, object_of

_encode = msgspec.json.Encoder().encode


class Taken(NamedTuple):
    """What has come of an answer."""

    text: str = ""
    thinking: str = ""
    calls: tuple[OllamaToolCall, ...] = ()


Reply = OllamaChatReply | OllamaGenerateReply
Make = Callable[[Taken, dict[str, Any]], Reply]
"""Makes the object of what was said and other fields."""


def chat_reply(taken: Taken, fields: dict[str, Any]) -> Reply:
    said = OllamaSaid(
        role="assistant",
        content=taken.text,
        thinking=taken.thinking or UNSET,
        tool_calls=list(taken.calls) or UNSET,
    )
    return OllamaChatReply(message=said, **fields)


def generate_reply(taken: Taken, fields: dict[str, Any]) -> Reply:
    return OllamaGenerateReply(response=taken.text, thinking=taken.thinking or UNSET, **fields)


class OllamaAnswer:
    """An answer while it is generated, and its EventEncoder: a stream's last object has how long it took."""

    def __init__(
        self, generation: Generation, model: str, make: Make, framing: Framing, *, logprobs: bool
    ) -> None:
        self._generation = generation
        self._model = model
        self._make = make
        self._framing = framing
        self._logprobs = logprobs
        self._call: CallDelta | None = None  # whose arguments are not all there

    def whole(self) -> Reply:
        """Return all of it, once the generation has finished."""
        (choice,) = self._generation.choices
        return self._make(self._taken(choice, last=True), self._fields(choice, done=True))

    def chunk(self, choice: Choice) -> list[bytes]:
        taken = self._taken(choice, last=choice.finish_reason is not None)
        if not any(taken) and not choice.logprobs:
            return []
        return [self._message(self._make(taken, self._fields(choice, done=False)))]

    def end(self) -> list[bytes]:
        (choice,) = self._generation.choices
        return [self._message(self._make(Taken(), self._fields(choice, done=True)))]

    def failure(self, error: ApiError) -> list[bytes]:
        return [self._framing.message(OLLAMA.body(error))]

    def _message(self, reply: Reply) -> bytes:
        return self._framing.message(_encode(reply))

    def _taken(self, choice: Choice, *, last: bool) -> Taken:
        """Return what has come, and of calls those that are whole: they are told of at once."""
        text, thinking, calls = "", "", list[OllamaToolCall]()
        for part in choice.take_parts():
            if isinstance(part, CallDelta) and part.id is UNSET and self._call is not None:
                self._call.function.arguments += part.function.arguments
                continue
            calls += self._end_call()
            match part:
                case CallDelta():
                    self._call = part
                case Thought(thought):
                    thinking += thought
                case _:
                    text += part
        if last:
            calls += self._end_call()
        return Taken(text, thinking, tuple(calls))

    def _end_call(self) -> Iterator[OllamaToolCall]:
        """One whose arguments are no JSON object, as where it was cut, is left out."""
        call, self._call = self._call, None
        if call is None or call.id is UNSET or call.function.name is UNSET:
            return
        arguments = object_of(call.function.arguments)
        if arguments is not None:
            function = OllamaCalled(name=call.function.name, arguments=arguments)
            yield OllamaToolCall(id=call.id, function=function)

    def _fields(self, choice: Choice, *, done: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self._model,
            "created_at": now(),
            "done": done,
            "logprobs": self._taken_logprobs(choice),
        }
        if not done:
            return fields
        generation, usage = self._generation, self._generation.usage()
        (group,) = generation.groups
        end = time.monotonic()
        return {
            **fields,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(end - generation.arrival),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(group.first_output - generation.arrival),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(end - group.first_output),
        }

    def _taken_logprobs(self, choice: Choice) -> list[TokenLogprobs] | UnsetType:
        entries = choice.take_logprobs()
        return logprobs_of(self._generation, entries).content if self._logprobs and entries else UNSET


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
