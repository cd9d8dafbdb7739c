"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.service.api.requests.forms import UNWRAPPED
from quire.service.api.requests.sampling import SamplingFields
from quire.service.json_fields import MAX_TOKENS, LogprobCount, Text
from quire.service.text.rendering import ReasoningEffort, TemplateArguments
from quire.service.text.structured import Document, Form, ResponseFormat, document_of
from quire.service.text.tools.protocol import (
    CallId,
    Function,
    ParallelCalls,
    ToolCalls,
    ToolChoice,
    Tools,
    check_tools,
)

_NAME = "Of who speaks, or of the tool: the chat template gets it, or else X-Quire-Ignored names it"
_REASONING = (
    "The assistant's thinking, as it was returned: the chat template gets it, or else X-Quire-Ignored "
    "names it"
)
_THOUGHTS = "The same, where neither reasoning nor reasoning_content is given"
_REFUSAL = "What the assistant said instead of an answer: the chat template gets it as text"
_CONTINUE = (
    "The answer goes on where the last message, the assistant's, ends; then add_generation_prompt is false"
)
_EFFORT = (
    "The chat template gets it. none turns off thinking that can be turned off; where the template has no "
    "use for it it is named in X-Quire-Ignored"
)
_BUDGET = (
    "After so many tokens of thinking the template's own end of it comes; where the model does not think it "
    "is named in X-Quire-Ignored"
)
_INCLUDE = "false: answers do not carry what the model thought; its tokens are counted all the same"
_OPTIONS = "As OpenRouter has it: what it gives is as if given by the fields of their own"


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: Text


class RefusalPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """The assistant's, as OpenAI returns it."""

    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


Parts = Annotated[list[TextPart | RefusalPart], Meta(min_length=1, max_length=1024)]


class ThoughtPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """As LiteLLM has it, beside `reasoning_content`, which has the same text."""

    thinking: Text


class RedactedThoughtPart(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"
):
    """Only whoever wrote it can read it."""


Thoughts = Annotated[list[ThoughtPart | RedactedThoughtPart], Meta(min_length=1, max_length=1024)]


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The assistant's may have calls beside or instead of content; a tool's answers one of them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts | None = None
    name: Annotated[str, Meta(max_length=256, description=_NAME)] | None = None
    refusal: Annotated[Text, Meta(description=_REFUSAL)] | None = None
    reasoning: Annotated[Text, Meta(description=_REASONING)] | None = None
    reasoning_content: Annotated[Text, Meta(description=_REASONING)] | None = None
    thinking_blocks: Annotated[Thoughts, Meta(description=_THOUGHTS)] | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: CallId | None = None

    def __post_init__(self) -> None:
        for field in ("tool_calls", "refusal", "reasoning", "reasoning_content", "thinking_blocks"):
            if getattr(self, field) and self.role != "assistant":
                raise FieldError(field, f"{field} belongs to the role 'assistant', not to {self.role!r}")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise FieldError("tool_call_id", "tool_call_id belongs to the role 'tool', which needs it")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise FieldError("content", f"a message of the role {self.role!r} needs content")

    @property
    def text(self) -> str:
        content = self.content or self.refusal or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    @property
    def thought(self) -> str:
        """Return what was thought, by the first of its names."""
        parts = (part.thinking for part in self.thinking_blocks or () if isinstance(part, ThoughtPart))
        return self.reasoning or self.reasoning_content or "\n".join(parts)

    def as_template_message(self) -> dict[str, Any]:
        """Return plain types, as templates expect; a developer speaks as the system."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.tool_calls is not None:
            message["tool_calls"] = [call.as_template_call() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


Messages = Annotated[list[Message], Meta(min_length=1, max_length=4096)]


def check_continuation(messages: Sequence[Message], add_generation_prompt: bool | None) -> None:
    """Check that a prompt can end where the last message does. Raises FieldError."""
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls is not None:
        raise FieldError(
            "continue_final_message",
            "continue_final_message goes on from a last message of the role 'assistant' without "
            f"tool_calls, and the last one is of the role {last.role!r}",
        )
    if add_generation_prompt:
        raise FieldError(
            "continue_final_message",
            "continue_final_message may not be given together with add_generation_prompt: true",
        )


def check_answered(messages: Sequence[Message]) -> None:
    """Check that what each tool says answers a call. Raises FieldError."""
    known: set[str] = set()
    for at, message in enumerate(messages):
        known |= {call.id for call in message.tool_calls or ()}
        if message.tool_call_id is not None and message.tool_call_id not in known:
            name = f"messages[{at}].tool_call_id"
            raise FieldError(name, f"{name} is {message.tool_call_id!r}, which no call before it has")


class ThinkingOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: ParallelCalls | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool, Meta(description=_CONTINUE)] = False
    reasoning_effort: Annotated[ReasoningEffort, Meta(description=_EFFORT)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=MAX_TOKENS, description=_BUDGET)] | None = None
    include_reasoning: Annotated[bool, Meta(description=_INCLUDE)] = True
    reasoning: Annotated[ThinkingOptions, Meta(description=_OPTIONS)] | None = None
    chat_template_kwargs: TemplateArguments | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reasoning is not None:
            self._take_over(self.reasoning)
        check_answered(self.messages)
        if self.continue_final_message:
            check_continuation(self.messages, self.add_generation_prompt)
        functions = None if self.tools is None else [tool.function for tool in self.tools]
        check_tools(functions, self.tool_choice)
        form = next(iter(self._own_form_fields), None)
        if self.thinking_token_budget is not None and form in UNWRAPPED:
            raise FieldError(
                "thinking_token_budget", f"thinking_token_budget may not be given together with {form}"
            )
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs may only be given with logprobs: true")

    def _take_over(self, options: ThinkingOptions) -> None:
        if options.enabled is False and options.effort not in (None, "none"):
            raise FieldError(
                "reasoning", f"reasoning.enabled is false, and reasoning.effort {options.effort!r}: give one"
            )
        effort = "none" if options.enabled is False else options.effort
        for name, value in (("reasoning_effort", effort), ("thinking_token_budget", options.max_tokens)):
            own = getattr(self, name)
            if None not in (own, value) and own != value:
                raise FieldError(
                    name, f"{name} is {own!r}, and reasoning says {value!r}: give one of them, or the same"
                )
            if own is None:
                setattr(self, name, value)
        if options.exclude:
            self.include_reasoning = False

    @property
    def offered_functions(self) -> list[Function]:
        """Return those that the model may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or []]

    @property
    def document(self) -> Document | None:
        """Return what the answer must be, unless it is calls."""
        return document_of("response_format", self.response_format)

    @property
    def form_fields(self) -> list[str]:
        own = "tools" if self.offered_functions else "response_format" if self.document else ""
        return [own] * bool(own) + super().form_fields

    def form(self) -> Form | None:
        return super().form() if self.document is None else self.document.form()
