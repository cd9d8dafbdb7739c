"""Replies of Ollama's API: whole, and as the objects of its streams."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from quire.service.answer.replies import TokenLogprobs


def now() -> datetime:
    return datetime.now(UTC)


class OllamaCalled(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct, kw_only=True):
    id: str
    function: OllamaCalled


class OllamaSaid(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[OllamaToolCall] | msgspec.UnsetType = msgspec.UNSET


class _Part(msgspec.Struct, kw_only=True):
    """Of a stream; a whole answer is the last part of one, with all that was said.

    Durations are nanoseconds: load_duration is 0, as the model is there before it is asked.
    """

    model: str
    created_at: datetime
    done: bool
    done_reason: Literal["stop", "length", "load"] | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[TokenLogprobs] | msgspec.UnsetType = msgspec.UNSET


class OllamaChatReply(_Part, kw_only=True):
    message: OllamaSaid


class OllamaGenerateReply(_Part, kw_only=True):
    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET


class EmbedReply(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddingsReply(msgspec.Struct):
    embedding: list[float]


class OllamaVersion(msgspec.Struct):
    version: str


class ModelDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: ModelDetails


class RunningModel(OllamaModel, kw_only=True):
    expires_at: datetime
    size_vram: int
    context_length: int


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class RunningModels(msgspec.Struct):
    models: list[RunningModel]


class ShowReply(msgspec.Struct, kw_only=True):
    modelfile: str = ""
    parameters: str = ""
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime
