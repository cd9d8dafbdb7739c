"""The messages that clients of the Responses API send."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.service.api.responses.sampling import LOGPROBS, ResponseSampling
from quire.service.api.tool_lists import left_out, own_tools
from quire.service.http.tidying import Own
from quire.service.inert import is_empty
from quire.service.json_fields import MAX_TOKENS, ModelName, Text
from quire.service.text.rendering import ReasoningEffort
from quire.service.text.structured import Document, FlatFormat, Form, TextFormat, document_of
from quire.service.text.tools.protocol import (
    MAX_TOOLS,
    Arguments,
    CalledFunction,
    CallId,
    FlatTool,
    FlatToolChoice,
    Function,
    FunctionName,
    ParallelCalls,
    ToolCall,
    check_tools,
)

_PREVIOUS = (
    "Goes on from a response of the same WebSocket, and waits for its end, or from one of the same key that "
    "was stored"
)
_STREAM_ID = "Given back with each event. Responses of one stream_id are generated one after another"
_STORE = (
    "Whether it is kept for GET /v1/responses/{id} and previous_response_id, until others need the room; "
    "left out, over HTTP it is, and of a WebSocket, which has its own memory, it is not"
)
_TOOLS = "Functions. Tools of other types, which cannot run here, are left out and named in X-Quire-Ignored"
_INERT = "Without effect here, and given back with the response"
_ID = "As it was returned; it changes nothing"
_ENCRYPTED = "Only whoever wrote it can read it: it is not used"

_FUNCTIONS = Own(FlatTool, ("function",))
_WITHOUT_EFFECT = (
    *("max_tool_calls", "background", "truncation", "service_tier", "safety_identifier"),
    "prompt_cache_key",
)

Identifier = Annotated[str, Meta(max_length=256)]
StreamId = Annotated[str, Meta(min_length=1, max_length=256, description=_STREAM_ID)]
_Tool = Annotated[dict[str, Any], Meta(extra={"own": _FUNCTIONS})]


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`output_text` is what the model said before, and `refusal` what it said instead, in a field of that
    name; they may carry the lists that they came with.
    """

    type: Literal["input_text", "output_text", "refusal", "reasoning_text"]
    text: Text | None = None
    refusal: Text | None = None
    annotations: Annotated[list[dict[str, Any]], Meta(max_length=1024, description=_ID)] | None = None
    logprobs: Annotated[list[dict[str, Any]], Meta(max_length=1 << 18, description=_ID)] | None = None

    def __post_init__(self) -> None:
        needed, other = ("refusal", "text") if self.type == "refusal" else ("text", "refusal")
        if getattr(self, needed) is None:
            raise FieldError(needed, f"a part of the type {self.type!r} needs {needed}")
        if getattr(self, other) is not None:
            raise FieldError(other, f"a part of the type {self.type!r} has no {other}")

    @property
    def said(self) -> str:
        return self.text or self.refusal or ""


Content = Text | Annotated[list[ContentPart], Meta(min_length=1, max_length=1024)]


class SummaryPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["summary_text"]
    text: Text


# what an item of a type needs, and what it may have
_NEEDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
_MAY_HAVE = {
    "function_call_output": ("name",),
    "reasoning": ("content", "summary", "encrypted_content"),
}
_OWN_FIELDS = ("role", "content", "call_id", "name", "arguments", "output", "summary", "encrypted_content")
# by role or type; else input_text
_PARTS_OF = {"assistant": ("output_text", "refusal"), "reasoning": ("reasoning_text",)}


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message (role, content) or a function_call (call_id, name, arguments), of the client or of an earlier
    response, the function_call_output (call_id, output, name) of a call, reasoning of an earlier response, or
    an item_reference (id) to any item of one that was stored.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = (
        "message"
    )
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: Arguments | None = None
    output: Content | None = None
    summary: Annotated[list[SummaryPart], Meta(max_length=1024)] | None = None
    encrypted_content: Annotated[str, Meta(max_length=1 << 20, description=_ENCRYPTED)] | None = None
    id: Annotated[str, Meta(max_length=256, description=_ID)] | None = None
    status: Annotated[Literal["in_progress", "completed", "incomplete"], Meta(description=_ID)] | None = None

    def __post_init__(self) -> None:
        needs = _NEEDS[self.type]
        has = {field for field in (*_OWN_FIELDS, "id") if getattr(self, field) is not None}
        for field in needs:
            if field not in has:
                raise FieldError(field, f"an item of the type {self.type!r} needs {field}")
        for field in _OWN_FIELDS:
            if field in has and field not in (*needs, *_MAY_HAVE.get(self.type, ())):
                raise FieldError(field, f"an item of the type {self.type!r} has no {field}")
        if isinstance(self._said, list):
            kinds = _PARTS_OF.get(self.role or self.type, ("input_text",))
            wrong = next((part.type for part in self._said if part.type not in kinds), None)
            if wrong is not None:
                of = f"the role {self.role!r}" if self.role else f"the type {self.type!r}"
                raise FieldError("content", f"content of {of} must be {' or '.join(kinds)}, got {wrong}")

    @property
    def _said(self) -> Content:
        return self.content or self.output or ""

    @property
    def text(self) -> str:
        """Return the text of a message, of what a call gave, or of reasoning."""
        said = self._said
        return said if isinstance(said, str) else "\n".join(part.said for part in said)

    @property
    def thought(self) -> str:
        """Return what of reasoning can be read: another server's may have but a summary, or not even that."""
        return self.text or "\n".join(part.text for part in self.summary or ())

    def as_call(self) -> ToolCall:
        function = CalledFunction(name=self.name or "", arguments=self.arguments or "")
        return ToolCall(id=self.call_id or "", function=function)


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: FlatFormat | None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseRequest(ResponseSampling, kw_only=True, forbid_unknown_fields=True, dict=True):
    model: ModelName | None = None
    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    stream: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16, description="Your own labels, given back with the response"),
        ]
        | None
    ) = None
    store: Annotated[bool, Meta(description=_STORE)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[_Tool], Meta(max_length=MAX_TOOLS, description=_TOOLS)] | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: ParallelCalls | None = None
    previous_response_id: Annotated[str, Meta(max_length=256, description=_PREVIOUS)] | None = None
    reasoning: Annotated[Reasoning, Meta(description=_INERT)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=1 << 31, description=_INERT)] | None = None
    background: (
        Annotated[bool, Meta(description="Only false: a response is generated while one waits")] | None
    ) = None
    truncation: (
        Annotated[
            str,
            Meta(description="No input is shortened", extra_json_schema={"enum": ["disabled"]}),
        ]
        | None
    ) = None
    service_tier: (
        Annotated[Literal["auto", "default", "flex", "scale", "priority"], Meta(description=_INERT)] | None
    ) = None
    safety_identifier: Annotated[str, Meta(max_length=512, description=_INERT)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512, description=_INERT)] | None = None

    def __post_init__(self) -> None:
        if self.background:
            raise FieldError(
                "background", "background must be false: a response is generated while one waits"
            )
        if self.truncation not in (None, "disabled"):
            raise FieldError(
                "truncation", "truncation must be disabled: an input that is too long is refused"
            )
        functions = self.functions
        check_tools(functions or None, self.tool_choice)
        given = ["tools"] * bool(self.offered_functions)
        given += ["text.format"] * (self.document is not None)
        if self.ignore_eos and given:
            raise FieldError("ignore_eos", f"ignore_eos may not be given together with {given[0]}")

    @cached_property
    def functions(self) -> list[FlatTool]:
        """Return the tools that can be called here. Raises FieldError."""
        return own_tools(self.tools or (), _FUNCTIONS)

    @property
    def offered_functions(self) -> list[Function]:
        """Return those that the model may call."""
        return [] if self.tool_choice == "none" else [*self.functions]

    @property
    def ignored_fields(self) -> list[str]:
        """Name what has no effect."""
        names = [name for name in _WITHOUT_EFFECT if not is_empty(getattr(self, name))]
        names += ["reasoning.summary"] if self.reasoning is not None and self.reasoning.summary else []
        names += [f"include.{each}" for each in self.include or () if each != LOGPROBS]
        return [*names, *left_out(self.tools or (), _FUNCTIONS)]

    @property
    def names_results(self) -> bool:
        """Return whether what a call gave has the name of its function."""
        items = () if isinstance(self.input, str) else self.input
        return any(item.type == "function_call_output" and item.name is not None for item in items)

    @property
    def effort(self) -> ReasoningEffort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_output_tokens"

    @property
    def num_sequences(self) -> int:
        return 1

    @property
    def num_sequences_name(self) -> str:
        return "n"

    @property
    def text_format(self) -> FlatFormat:
        return (self.text.format if self.text is not None else None) or TextFormat()

    @property
    def document(self) -> Document | None:
        """Return what the answer must be, unless it is calls."""
        return document_of("text.format", self.text_format)

    def form(self) -> Form | None:
        """Return what the text must be. Raises FieldError."""
        return None if self.document is None else self.document.form()


class ResponseCreate(
    ResponseRequest, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="response.create"
):
    """Over a WebSocket, where every response is streamed."""

    stream_id: StreamId | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream is False:
            raise FieldError("stream", "stream may not be false on a WebSocket: responses come as events")

    @property
    def is_streamed(self) -> bool:
        return True

    @property
    def is_stored(self) -> bool:
        return bool(self.store)


class ResponseCancel(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="response.cancel"
):
    response_id: Identifier


ClientEvent = ResponseCreate | ResponseCancel
