"""The bodies that clients of Anthropic's Messages API send."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.service.api.tool_lists import left_out, own_tools
from quire.service.http.tidying import Own
from quire.service.json_fields import MAX_TOKENS, ModelName, Text
from quire.service.text.structured import MAX_SCHEMA_BYTES, Schema
from quire.service.text.tools.protocol import MAX_TOOLS, CallId

_INERT = "Without effect here"
_MAX_TOKENS = (
    "Where the context has less room, the answer may take what there is; one that fills it ends with the "
    "stop_reason model_context_window_exceeded"
)
_TOOLS = (
    "Tools of one's own (name, description, input_schema, strict). Tools that Anthropic hosts or defines, "
    "which have another type than custom, are left out and named in X-Quire-Ignored"
)
_SYSTEM = "Claude Code's attribution line at its head, x-anthropic-billing-header, is dropped"
_THINKING = "disabled: the model is asked not to think, where its chat template can ask for that"
_EDITS = "Only clear_thinking_…: which thinking a model is shown again is for its chat template to say"

Label = Annotated[str, Meta(max_length=256)]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Prefixes are cached without being asked."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: Annotated[CacheControl, Meta(description=_INERT)] | None = None


class TextBlock(_Block, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: Text


class ThinkingBlock(_Block, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    thinking: Text
    signature: Annotated[str, Meta(max_length=1 << 20, description=_INERT)] | None = None


class RedactedThinkingBlock(
    _Block, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"
):
    """Only whoever wrote it can read it, so it is left out, and named in X-Quire-Ignored."""

    data: Annotated[str, Meta(max_length=1 << 20)]


class Caller(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["direct"]


class ToolUseBlock(_Block, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    id: CallId
    name: ToolName
    input: dict[str, Any]
    caller: Annotated[Caller, Meta(description=_INERT)] | None = None
    toolset_name: None = None


class ToolResultBlock(_Block, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    tool_use_id: CallId
    content: Text | Annotated[list[TextBlock], Meta(max_length=1024)] | None = None
    is_error: Annotated[bool, Meta(description="true: the result is shown as an error")] | None = None
    toolset_name: None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Blocks = Annotated[list[Block], Meta(max_length=1024)]

_BLOCKS_OF: dict[str, tuple[type, ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}


class AnthropicMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: Text | Blocks

    def __post_init__(self) -> None:
        for block in self.blocks:
            if not isinstance(block, _BLOCKS_OF[self.role]):
                kind = block.__struct_config__.tag
                raise FieldError(
                    "content", f"content of the role {self.role!r} has no blocks of type {kind!r}"
                )

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content


class OwnTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client's."""

    name: ToolName
    input_schema: Schema
    type: Literal["custom"] | None = None
    description: Annotated[str, Meta(max_length=MAX_SCHEMA_BYTES)] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def __post_init__(self) -> None:
        if self.defer_loading:
            raise FieldError(
                "defer_loading", "defer_loading must be false: tools cannot be searched for here"
            )


_OWN = Own(OwnTool, (None, "custom"))
_Tool = Annotated[dict[str, Any], Meta(extra={"own": _OWN})]


class AutoChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class NamedChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    pass


Display = Literal["summarized", "omitted"]


class ThinkingOn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    display: Display | None = None


class ThinkingAdaptive(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="adaptive"
):
    display: Display | None = None


class ThinkingOff(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    pass


class OutputSchema(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    schema: Schema


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: OutputSchema | None = None
    effort: Annotated[Literal["low", "medium", "high", "xhigh", "max"], Meta(description=_INERT)] | None = (
        None
    )


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=4096)] | None = None


class ContextEdit(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(pattern="^clear_thinking_[0-9]{8}$", description=_EDITS)]


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    edits: Annotated[list[ContextEdit], Meta(max_length=16)] | None = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What decides the prompt."""

    INERT: ClassVar[tuple[str, ...]] = ("cache_control", "context_management", "speed")

    model: ModelName
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=4096)]
    system: (
        Annotated[Text | Annotated[list[TextBlock], Meta(max_length=1024)], Meta(description=_SYSTEM)] | None
    ) = None
    tools: Annotated[list[_Tool], Meta(max_length=MAX_TOOLS, description=_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Meta(description=_THINKING)] | None = (
        None
    )
    output_config: OutputConfig | None = None
    cache_control: Annotated[CacheControl, Meta(description=_INERT)] | None = None
    context_management: ContextManagement | None = None
    speed: Annotated[Literal["standard", "fast"], Meta(description=_INERT)] | None = None

    def __post_init__(self) -> None:
        _ = self.own_tools  # what is wrong in one is wrong in the body

    @cached_property
    def own_tools(self) -> list[OwnTool]:
        """Return the tools of the client's. Raises FieldError."""
        return own_tools(self.tools or (), _OWN)

    @property
    def other_tools(self) -> list[str]:
        """Name the others."""
        return [*left_out(self.tools or (), _OWN)]


class CountTokensRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """How long is the prompt of a request, which may come as a whole?"""


class MessagesRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    INERT: ClassVar[tuple[str, ...]] = (
        *PromptFields.INERT,
        *("metadata", "service_tier", "inference_geo", "user_profile_id", "workspace_id"),
    )

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS, description=_MAX_TOKENS)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] | None
    ) = None
    metadata: Annotated[Metadata, Meta(description=_INERT)] | None = None
    service_tier: Annotated[Literal["auto", "standard_only"], Meta(description=_INERT)] | None = None
    inference_geo: Annotated[Label, Meta(description=_INERT)] | None = None
    user_profile_id: Annotated[Label, Meta(description=_INERT)] | None = None
    workspace_id: Annotated[Label, Meta(description=_INERT)] | None = None
