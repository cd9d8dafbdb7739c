"""Fields of OpenAI's, Anthropic's and vLLM's APIs that change no token here, and those that would but cannot.

One table: requests are checked by it, `X-Quire-Ignored` names what it ignored, and /openapi.json and
docs/api.md list it. A field that is in a request's own type is none of this table's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.service.json_objects import wrong_key

MAX_BYTES = 64 << 10  # of one ignored value, as JSON

_Label = Annotated[str, Meta(max_length=512)]
_Labels = Annotated[dict[Annotated[str, Meta(max_length=64)], _Label], Meta(max_length=16)]
_Anything = dict[str, Any]
_Annotations = Annotated[list[_Anything], Meta(max_length=1024)]


@dataclass(frozen=True)
class Inert:
    """A field that is accepted, of this kind, and has no effect."""

    name: str
    kind: Any
    why: str

    def check(self, value: Any) -> None:
        """Raises ValueError."""
        data = msgspec.json.encode(value)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has {len(data)} bytes, more than {MAX_BYTES}")
        try:
            msgspec.json.decode(data, type=self.kind)
        except msgspec.ValidationError as error:
            key = wrong_key(value, self.kind) if isinstance(value, dict) else None
            message = str(error)
            if key is not None:
                raise ValueError(f"{key}: {message.partition(' - at ')[0]}") from None
            raise ValueError(message) from None

    def schema(self) -> dict[str, Any]:
        return {**msgspec.json.schema(self.kind), "description": f"No effect: {self.why}"}


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer, and is not supported: only an empty value is accepted."""

    name: str
    why: str

    def check(self, value: Any) -> None:
        """Raises ValueError."""
        if not is_empty(value):
            raise ValueError(self.why)

    def schema(self) -> dict[str, Any]:
        return {"enum": [None, False, "", [], {}], "description": f"Not supported: {self.why}"}


class AlwaysRefused(Refused):
    """One that asks for something even when it is empty: only null is accepted."""

    def check(self, value: Any) -> None:
        """Raises ValueError."""
        if value is not None:
            raise ValueError(self.why)

    def schema(self) -> dict[str, Any]:
        return {**super().schema(), "enum": [None]}


Row = Inert | Refused


def is_empty(value: Any) -> bool:
    """Return whether it says nothing, as if it were left out."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


_CACHE_CONTROL = Inert("cache_control", _Anything, "prefixes are cached by themselves")
_BREAKPOINT = Inert("prompt_cache_breakpoint", _Anything, "prefixes are cached by themselves")
_INDEX = Inert("index", Annotated[int, Meta(ge=0, le=1 << 16)], "they stand in their order")
_LABELS = Inert("metadata", _Labels, "labels of a store that is not kept")
_ACCOUNTING = (
    Inert("user", Annotated[str, Meta(max_length=256)], "your own label"),
    Inert("safety_identifier", _Label, "nobody is watched"),
    Inert("service_tier", Literal["auto", "default", "flex", "scale", "priority"], "there is one tier"),
    Inert("prompt_cache_key", _Label, "prefixes are found by their tokens"),
    Inert(
        "prompt_cache_retention",
        Literal["in_memory", "in-memory", "24h"],
        "KV blocks stay while there is room",
    ),
    Inert("prompt_cache_options", _Anything, "KV blocks stay while there is room"),
    Inert("verbosity", Literal["low", "medium", "high"], "models here have no such setting"),
)
_DIRECT = dict[Literal["type"], Literal["direct"]]
_TOKEN = Annotated[str, Meta(max_length=4096)]
_MODERATION = Refused("moderation", "the server judges no texts")
_GIVEN_BACK = ("safety_identifier", "service_tier", "prompt_cache_key")  # with a response, so in its own type
_NOT_PROMPT = "only the prompt is counted"
_OBFUSCATION = Inert("include_obfuscation", bool, "nothing is padded: use TLS")

INERT: dict[str, tuple[Row, ...]] = {
    # by the type's name in /openapi.json; a type has its bases' rows, too
    "SamplingFields": (
        *_ACCOUNTING,
        _LABELS,
        Inert("store", bool, "completions are not kept"),
        Inert("request_id", _Label, "the header X-Request-Id names a request"),
        Inert("spaces_between_special_tokens", bool, "text is decoded as the tokenizer says"),
        Inert("guided_decoding_backend", _Label, "there is one"),
        Refused(
            "logits_processors",
            "code of a client is not run in the server; logit_bias, bad_words and "
            "allowed_token_ids are there",
        ),
        Refused("guided_grammar", "give structured_outputs.grammar"),
        Refused("guided_whitespace_pattern", "JSON comes on one line"),
        Refused("kv_transfer_params", "blocks are not sent to other engines"),
        Refused("vllm_xargs", "they belong to plug-ins of vLLM"),
        Refused("prompt_embeds", "prompts are text or token ids"),
    ),
    "CompletionRequest": (Refused("suffix", "text cannot be inserted between two others"),),
    "ChatRequest": (
        _CACHE_CONTROL,
        Inert(
            "modalities",
            Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)],
            "text is all there is",
        ),
        Inert("include", Annotated[list[_Label], Meta(max_length=32)], "there is nothing more to include"),
        _MODERATION,
        Refused("audio", "models here write text"),
        Refused("prediction", "predicted output is not used"),
        Refused("functions", "give tools"),
        Refused("function_call", "give tool_choice"),
        AlwaysRefused("web_search_options", "the server searches nothing"),
        Refused("echo", "a chat's prompt is its template's"),
        Refused("documents", "put them into messages"),
        Refused("chat_template", "the model's own is used"),
        Refused("mm_processor_kwargs", "messages are text"),
    ),
    "StreamOptions": (_OBFUSCATION,),
    "ThinkingOptions": (Inert("summary", _Label, "thinking is given as it is"),),
    "Message": (
        _CACHE_CONTROL,
        Inert("id", _Label, "your own label"),
        Inert("annotations", _Annotations, "they are about the text, which the template gets"),
        Inert("phase", Literal["commentary", "final_answer"], "templates know no phases"),
        Inert("provider_specific_fields", _Anything, "another server's"),
        Refused("audio", "messages are text"),
        Refused("images", "messages are text"),
        Refused("function_call", "give tool_calls"),
    ),
    "ThoughtPart": (
        _CACHE_CONTROL,
        _INDEX,
        Inert("signature", Annotated[str, Meta(max_length=MAX_BYTES)], "nobody checks it"),
    ),
    "RedactedThoughtPart": (
        _CACHE_CONTROL,
        _INDEX,
        Inert("data", Annotated[str, Meta(max_length=MAX_BYTES)], "only whoever wrote it can read it"),
    ),
    "TextPart": (
        _CACHE_CONTROL,
        _BREAKPOINT,
        Inert("annotations", _Annotations, "they are about the text, which the template gets"),
    ),
    "RefusalPart": (_CACHE_CONTROL,),
    "ToolCall": (
        _CACHE_CONTROL,
        _INDEX,
        Inert("provider_specific_fields", _Anything, "another server's"),
    ),
    "Tool": (_CACHE_CONTROL,),
    "Function": (_CACHE_CONTROL,),
    "FlatTool": (
        Inert("allowed_callers", list[Literal["direct"]], "models here call tools themselves"),
        Refused("async", "models here wait for what a call gives"),
        Refused("defer_loading", "tools cannot be searched for"),
        Refused("output_schema", "chat templates show no such schema: describe it in description"),
    ),
    "OwnTool": (Refused("input_examples", "chat templates show none: put them into description"),),
    "NamedSchema": (
        Inert(
            "description",
            Annotated[str, Meta(max_length=MAX_BYTES)],
            "the text follows the schema, which the model is not shown",
        ),
    ),
    "ResponseRequest": (
        *(row for row in _ACCOUNTING if row.name not in _GIVEN_BACK),
        Inert("client_metadata", _Anything, "your own labels"),
        Inert("stream_options", Annotated[dict[str, bool], Meta(max_length=1)], "nothing is padded: use TLS"),
        _MODERATION,
        Refused("context_management", "no input is made shorter: send what the model is to see"),
        Refused("conversation", "give previous_response_id, or the whole conversation as input"),
        Refused("prompt", "there are no stored prompts: give input"),
    ),
    "PoolingFields": (
        Inert("user", Annotated[str, Meta(max_length=256)], "your own label"),
        Inert("request_id", _Label, "the header X-Request-Id names a request"),
        Refused("messages", "give input: texts or token ids"),
        Refused("mm_processor_kwargs", "inputs are text"),
    ),
    "TextBlock": (Refused("citations", "models here cite nothing"),),
    "OllamaMessage": (Refused("images", "models here read text"),),
    "OllamaGenerateRequest": (
        Refused("images", "models here read text"),
        Refused("suffix", "text cannot be inserted between two others"),
        Refused("template", "the model's own is used"),
        Refused("context", "send the whole conversation to /api/chat"),
    ),
    "CountTokensRequest": (
        Inert("max_tokens", Annotated[int, Meta(ge=0)], _NOT_PROMPT),
        Inert("stream", bool, _NOT_PROMPT),
        Inert("temperature", Annotated[float, Meta(ge=0, le=1)], _NOT_PROMPT),
        Inert("top_p", Annotated[float, Meta(ge=0, le=1)], _NOT_PROMPT),
        Inert("top_k", Annotated[int, Meta(ge=0)], _NOT_PROMPT),
        Inert("stop_sequences", Annotated[list[_Label], Meta(max_length=16)], _NOT_PROMPT),
        Inert("metadata", _Anything, _NOT_PROMPT),
        Inert("service_tier", Literal["auto", "standard_only"], _NOT_PROMPT),
    ),
    "PromptFields": (
        Inert("diagnostics", _Anything, "GET /v1/requests/{id}/why tells what the cache had"),
        Inert(
            "fallbacks",
            Literal["default"] | Annotated[list[_Anything], Meta(max_length=16)],
            "no request is declined for another model",
        ),
        Inert("fallback_credit_token", _TOKEN | _Anything, "nobody is billed"),
        Inert("billing_policy", _Anything, "nobody is billed"),
        Refused("compaction", "ask for a summary in a message"),
        Refused("container", "the server runs no code"),
        Refused("mcp_servers", "the server reaches no others: run their tools in the client"),
        Refused("thread", "send the whole conversation (the client's tool_runner takes thread=False)"),
    ),
    "InputItem": (
        Inert("phase", Literal["commentary", "final_answer"], "templates know no phases"),
        Inert("created_by", _Label, "your own label"),
        Inert("caller", _DIRECT, "models here call tools themselves"),
    ),
    "ContentPart": (_CACHE_CONTROL, _BREAKPOINT),
    "Reasoning": (
        Inert("context", Literal["auto"], "the chat template says which thinking a model is shown again"),
        Inert("mode", Literal["standard"], "there is one"),
        Inert("generate_summary", Literal["auto", "concise", "detailed"], "thinking is given as it is"),
    ),
    "TextOptions": (
        Inert("verbosity", Literal["low", "medium", "high"], "models here have no such setting"),
    ),
}


@cache
def rows_of(kind: type) -> dict[str, Row]:
    """Return the table's rows of a type, its bases' included, by field."""
    return {row.name: row for base in reversed(kind.__mro__) for row in INERT.get(base.__name__, ())}
