"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.service.api.requests.sampling import SamplingFields
from quire.service.json_fields import LogprobCount, Text
from quire.service.text.rendering import TemplateArguments
from quire.service.text.structured import Form, ResponseFormat, TextFormat, json_form
from quire.service.text.tools.protocol import (
    CallId,
    Function,
    ParallelCalls,
    ToolCalls,
    ToolChoice,
    Tools,
    check_tools,
)


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: Text


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The assistant's may have calls beside or instead of content; a tool's answers one of them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Meta(min_length=1, max_length=1024)] | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: CallId | None = None

    def __post_init__(self) -> None:
        if self.tool_calls is not None and self.role != "assistant":
            raise FieldError(
                "tool_calls", f"tool_calls belongs to the role 'assistant', not to {self.role!r}"
            )
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise FieldError("tool_call_id", "tool_call_id belongs to the role 'tool', which needs it")
        if self.content is None and self.tool_calls is None:
            raise FieldError("content", "content may be left out only with tool_calls")

    def as_template_message(self) -> dict[str, Any]:
        """Plain types, as templates expect; a developer speaks as the system."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.as_template_call() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


Messages = Annotated[list[Message], Meta(min_length=1, max_length=4096)]


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: ParallelCalls | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateArguments | None = None
    store: Annotated[bool, Meta(description="Only false: completions are not kept")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.store:
            raise FieldError("store", "store must be false: completions are not kept here")
        self._check_calls()
        functions = None if self.tools is None else [tool.function for tool in self.tools]
        check_tools(functions, self.tool_choice, self.parallel_tool_calls)
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs may only be given with logprobs: true")

    def _check_calls(self) -> None:
        """Check that what a tool says answers a call."""
        known: set[str] = set()
        for at, message in enumerate(self.messages):
            known |= {call.id for call in message.tool_calls or ()}
            if message.tool_call_id is not None and message.tool_call_id not in known:
                name = f"messages[{at}].tool_call_id"
                raise FieldError(name, f"{name} is {message.tool_call_id!r}, which no call before it has")

    @property
    def offered_functions(self) -> list[Function]:
        """Return those that the model may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or []]

    @property
    def form_fields(self) -> list[str]:
        asks = not isinstance(self.response_format, TextFormat | None)
        offers = ["tools"] * bool(self.offered_functions)
        return offers + ["response_format"] * asks + super().form_fields

    def form(self) -> Form | None:
        return json_form("response_format", self.response_format) or super().form()
