"""Replies of the Responses API: the response, its output items, and the events that tell of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.service.answer.replies import TokenLogprobs
from quire.service.api.responses.protocol import Reasoning
from quire.service.errors import REPLICA_LOST, ApiError
from quire.service.text.structured import FlatFormat
from quire.service.text.tools.protocol import FlatTool, FlatToolChoice

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprobs] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """Completed when its arguments are a JSON object, else incomplete: then nobody can answer it."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before what follows."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[dict[str, str]] = []
    content: list[ReasoningText]
    encrypted_content: None = None


OutputItem = OutputMessage | OutputReasoning | OutputCall


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseFailure(msgspec.Struct):
    """OpenAI's clients know one code for a server's faults; a router's also know a lost replica."""

    code: Literal["server_error", "replica_lost"]
    message: str
    cause: str | msgspec.UnsetType = msgspec.UNSET  # the code that the error has elsewhere

    @classmethod
    def of(cls, error: ApiError) -> ResponseFailure:
        if error.code == REPLICA_LOST:
            return cls("replica_lost", error.message)
        return cls("server_error", error.message, error.code or msgspec.UNSET)


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # what is cached is not billed, so it is not counted


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class DeletedResponse(msgspec.Struct):
    """What DELETE says."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class TextConfig(msgspec.Struct):
    format: FlatFormat


class ResponseReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    background: bool = False
    service_tier: str = "default"
    safety_identifier: str | None
    prompt_cache_key: str | None
    max_tool_calls: int | None
    reasoning: Reasoning
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    text: TextConfig
    tool_choice: FlatToolChoice
    tools: list[FlatTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
