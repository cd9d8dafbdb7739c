"""Replies of Anthropic's Messages API, and the parts of its events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quire.service.answer.choice import Choice
from quire.service.answer.generation import Generation

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class SaidText(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class SaidThinking(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # nobody has to be convinced of it


class SaidCall(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Said = SaidText | SaidThinking | SaidCall


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that were computed: beside them stand those that the cache had."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # what is cached is not billed, so it is not counted
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, generation: Generation) -> AnthropicUsage:
        usage = generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


class MessageReply(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Said]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


def stop_reason(choice: Choice, *, fills_context: bool, called: bool) -> StopReason:
    """Return why the answer ended; `fills_context`: all the room there was is what it was given.

    called: there is a call whose arguments are a JSON object, so that somebody can answer it.
    """
    match choice.finish_reason:
        case "tool_calls":
            return "tool_use" if called else "end_turn"
        case "length":
            return "model_context_window_exceeded" if fills_context else "max_tokens"
    return "end_turn" if stop_sequence(choice) is None else "stop_sequence"


def stop_sequence(choice: Choice) -> str | None:
    return choice.stop_reason if isinstance(choice.stop_reason, str) else None
