"""Replies to clients that do not stream, and the parts that streams share."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from quire.service.text.tools.calls import ReplyToolCall

UsageInStream = Literal["nowhere", "end", "each chunk"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int, reasoning: int = 0) -> Usage:
        """reasoning: tokens of the completion by which the model thought."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached),
            completion_tokens_details=CompletionTokensDetails(reasoning),
        )


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # per prompt token, by token id; null for the first


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobs]
    refusal: None = None


class ReplyChoice(msgspec.Struct, kw_only=True):
    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = (
        None  # the stop string or token id that ended it; None: the tokenizer's eos
    )
    cumulative_logprob: float | msgspec.UnsetType = msgspec.UNSET  # of a beam
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(ReplyChoice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None


class ReplyMessage(msgspec.Struct):
    role: str
    content: str | None
    tool_calls: list[ReplyToolCall] | msgspec.UnsetType = msgspec.UNSET
    refusal: None = None
    annotations: list[dict[str, str]] = []
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # what the model thought first
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET  # the same


class ChatChoice(ReplyChoice, kw_only=True):
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None


class CompletionReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Health(msgspec.Struct):
    """The server's health, as /health says it."""

    status: Literal["ok"] = "ok"


class ServerVersion(msgspec.Struct):
    """The version of Quire that serves, as /version says it."""

    version: str


class Readiness(msgspec.Struct):
    """The state of a server that serves, as /ready says it."""

    status: Literal["ready"] = "ready"
    graphs_left: int = 0  # CUDA graphs that are still to be captured; until then steps are slower


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str
    max_model_len: int
    # as Anthropic's clients read it:
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Model]
    has_more: bool = False
    first_id: str
    last_id: str


class TokenizeReply(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class StoppedStream(msgspec.Struct):
    id: str
    stopped: bool  # false: it had ended before


class DetokenizeReply(msgspec.Struct):
    prompt: str
