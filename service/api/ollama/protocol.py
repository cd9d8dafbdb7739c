"""The bodies that clients of Ollama's API send."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.engine.messages import MIN_REPETITION_PENALTY
from quire.service.api.pooling.protocol import Dimensions
from quire.service.json_fields import MAX_TOKENS, LogprobCount, ModelName, StopText, Text
from quire.service.text.structured import Schema
from quire.service.text.tools.protocol import CallId, Tool

_INERT = "Without effect here"
_NUM_PREDICT = "-1 or -2: as many as fit, which more than that is, too"
_FORMAT = '"json": a JSON object; a schema: JSON that it allows'
_THINK = "Whether the model is asked to think, where its chat template can ask for that"
_LAST_N = "-1: penalties are of the whole text, so with one of them it may be left out or -1"
_NOT_SAMPLED = "Without effect here: nothing is sampled"
_ONLY = "Not supported: only the value that is without effect"
_NEUTRAL: dict[str, float] = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}  # of what is not supported

Count = Annotated[int, Meta(ge=-1, le=1 << 31, description=_INERT)]
CallIndex = Annotated[int, Meta(ge=0, le=1 << 16, description=_INERT)]
Label = Annotated[str, Meta(max_length=256)]
One = Annotated[float, Meta(description=_ONLY, extra_json_schema={"enum": [1]})]
Zero = Annotated[float, Meta(description=_ONLY, extra_json_schema={"enum": [0]})]
KeepAlive = Annotated[float | Label, Meta(description="Without effect here: the model stays loaded")]


class OllamaOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to sample. What is left out is as in the other APIs here."""

    INERT: ClassVar[tuple[str, ...]] = (
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep"),
        *(
            "numa",
            "low_vram",
            "f16_kv",
            "logits_all",
            "vocab_only",
            "use_mmap",
            "use_mlock",
            "embedding_only",
        ),
        *("mirostat_tau", "mirostat_eta", "penalize_newline"),
    )

    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_TOKENS, description=_NUM_PREDICT)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=1 << 31, description=_LAST_N)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    tfs_z: One | None = None
    typical_p: One | None = None
    mirostat: Zero | None = None
    mirostat_tau: Annotated[float, Meta(description=_INERT)] | None = None
    mirostat_eta: Annotated[float, Meta(description=_INERT)] | None = None
    penalize_newline: Annotated[bool, Meta(description=_INERT)] | None = None
    num_ctx: Count | None = None
    num_batch: Count | None = None
    num_gpu: Count | None = None
    main_gpu: Count | None = None
    num_thread: Count | None = None
    num_keep: Count | None = None
    numa: Annotated[bool, Meta(description=_INERT)] | None = None
    low_vram: Annotated[bool, Meta(description=_INERT)] | None = None
    f16_kv: Annotated[bool, Meta(description=_INERT)] | None = None
    logits_all: Annotated[bool, Meta(description=_INERT)] | None = None
    vocab_only: Annotated[bool, Meta(description=_INERT)] | None = None
    use_mmap: Annotated[bool, Meta(description=_INERT)] | None = None
    use_mlock: Annotated[bool, Meta(description=_INERT)] | None = None
    embedding_only: Annotated[bool, Meta(description=_INERT)] | None = None

    def __post_init__(self) -> None:
        if self.num_predict == 0:
            raise FieldError("num_predict", "num_predict must be at least 1, or -1 for as many as fit, got 0")
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) not in (None, neutral):
                raise FieldError(
                    name, f"{name} is not supported: leave it out, or give {neutral}, which is without effect"
                )
        if self.repeat_last_n in (None, -1):
            return
        for name, neutral in (("repeat_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
            if getattr(self, name) not in (None, neutral):
                raise FieldError("repeat_last_n", f"repeat_last_n must be -1: {name} is of the whole text")


class CalledWith(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: dict[str, Any]
    index: CallIndex | None = None


class OllamaCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    function: CalledWith
    id: CallId | None = None
    type: Literal["function"] | None = None
    index: CallIndex | None = None  # Open WebUI has it here


class OllamaMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool's answers the call of its tool_call_id, or else the first of its tool_name without an answer."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=128)] | None = None
    tool_name: Label | None = None
    tool_call_id: CallId | None = None


class _Generating(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: ModelName
    stream: Annotated[bool, Meta(description="true if left out")] | None = None
    options: OllamaOptions | None = None
    format: Annotated[Literal["", "json"] | Schema, Meta(description=_FORMAT)] | None = None
    think: Annotated[bool | Literal["low", "medium", "high"], Meta(description=_THINK)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    keep_alive: KeepAlive | None = None
    truncate: (
        Annotated[bool, Meta(description="Without effect here: a prompt that is too long is refused")] | None
    ) = None
    shift: (
        Annotated[bool, Meta(description="Without effect here: an answer ends where the context does")] | None
    ) = None


class OllamaChatRequest(_Generating, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[OllamaMessage], Meta(max_length=4096)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None


class OllamaGenerateRequest(_Generating, kw_only=True, forbid_unknown_fields=True):
    prompt: Text | None = None
    system: Text | None = None
    raw: Annotated[bool, Meta(description="true: the prompt goes to the model as it is")] | None = None


class _Embedding(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: ModelName
    options: Annotated[OllamaOptions, Meta(description=_NOT_SAMPLED)] | None = None
    keep_alive: KeepAlive | None = None


class EmbedRequest(_Embedding, kw_only=True, forbid_unknown_fields=True):
    input: Text | Annotated[list[Text], Meta(max_length=2048)] | None = None
    truncate: (
        Annotated[bool, Meta(description="Whether a text that is too long is cut; true if left out")] | None
    ) = None
    dimensions: Dimensions | None = None


class EmbeddingsRequest(_Embedding, kw_only=True, forbid_unknown_fields=True):
    """Ollama's older one, of one text."""

    prompt: Text | None = None


class ShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: ModelName | None = None
    name: ModelName | None = None
    verbose: Annotated[bool, Meta(description=_INERT)] | None = None
