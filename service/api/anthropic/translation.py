"""From Anthropic's request to the chat request that it is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from quire.engine.errors import FieldError
from quire.service.api.anthropic.history import chat_messages
from quire.service.api.anthropic.protocol import (
    AnyChoice,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    OwnTool,
    PromptFields,
    RedactedThinkingBlock,
    ThinkingAdaptive,
    ThinkingOff,
    ThinkingOn,
)
from quire.service.api.requests.chat import ChatRequest
from quire.service.text.rendering import ReasoningEffort, TemplateArguments
from quire.service.text.structured import JsonSchemaFormat, NamedSchema
from quire.service.text.tools.protocol import ChosenFunction, ChosenTool, Function, Tool, ToolChoice

if TYPE_CHECKING:
    from quire.service.text.template import ChatTemplate


def prompt_request(body: PromptFields, template: ChatTemplate | None) -> ChatRequest:
    """Return what decides the prompt, and what the answer must be. Raises FieldError."""
    tools = [_as_tool(tool) for tool in body.own_tools]
    choice = _choice(body, tools)
    asked = None if body.output_config is None else body.output_config.format
    schema = None if asked is None else NamedSchema(name="output", schema=asked.schema)
    return ChatRequest(
        model=body.model,
        messages=chat_messages(body),
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=False if tools and _only_one(body) else None,
        response_format=None if schema is None else JsonSchemaFormat(json_schema=schema),
        reasoning_effort=_effort(body, template),
        chat_template_kwargs=_thinking(body, template),
    )


def chat_request(body: MessagesRequest, prompt: ChatRequest, room: int, *, thinks: bool) -> ChatRequest:
    """Return `prompt` with how to answer it; `room` is how many tokens an answer may have at most.

    A budget that thinking could not exceed in any case is none, nor is one of a model that does not think.
    """
    most = min(body.max_tokens, room)
    budget = body.thinking.budget_tokens if thinks and isinstance(body.thinking, ThinkingOn) else most
    return msgspec.structs.replace(
        prompt,
        max_tokens=most,
        thinking_token_budget=budget if budget < most else None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )


def ignored_fields(body: PromptFields, template: ChatTemplate | None, *, thinks: bool) -> Iterator[str]:
    """Name what had no effect; `thinks`: the model can."""
    yield from (name for name in body.INERT if getattr(body, name, None) is not None)
    blocks = [block for message in body.messages for block in message.blocks]
    system = [] if isinstance(body.system, str) else body.system or []
    marked = any(block.cache_control for block in (*blocks, *system))
    if body.cache_control is None and (marked or any(tool.get("cache_control") for tool in body.tools or ())):
        yield "cache_control"
    if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
        yield "redacted_thinking"
    yield from body.other_tools
    if (
        body.output_config is not None
        and body.output_config.effort is not None
        and not _effort(body, template)
    ):
        yield "output_config.effort"
    off_in_vain = isinstance(body.thinking, ThinkingOff) and _thinking(body, template) is None
    if off_in_vain or (isinstance(body.thinking, ThinkingOn | ThinkingAdaptive) and not thinks):
        yield "thinking"


def _thinking(body: PromptFields, template: ChatTemplate | None) -> TemplateArguments | None:
    """Return what the model's chat template is told, if it can be; adaptive is as the template has it."""
    given = isinstance(body.thinking, ThinkingOn | ThinkingOff)
    if not given or template is None or not template.mentions("enable_thinking"):
        return None
    return TemplateArguments(enable_thinking=isinstance(body.thinking, ThinkingOn))


def _effort(body: PromptFields, template: ChatTemplate | None) -> ReasoningEffort | None:
    """Return it where the model's chat template has a use for it."""
    can_be_asked = template is not None and template.mentions("reasoning_effort")
    return body.output_config.effort if body.output_config is not None and can_be_asked else None


def _as_tool(tool: OwnTool) -> Tool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _choice(body: PromptFields, tools: list[Tool]) -> ToolChoice | None:
    match body.tool_choice:
        case NamedChoice(name=name):
            if tools and name not in {tool.function.name for tool in tools}:
                raise FieldError(
                    "tool_choice", f"tool_choice names {name!r}, which is none of the tools here"
                )
            return ChosenTool(function=ChosenFunction(name=name))
        case AnyChoice():
            return "required"
        case NoChoice():
            return "none"
    return None


def _only_one(body: PromptFields) -> bool:
    return getattr(body.tool_choice, "disable_parallel_tool_use", None) is True
