"""From Anthropic's request to the chat request that it is here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.engine.errors import FieldError
from quire.service.api.anthropic.history import chat_messages
from quire.service.api.anthropic.protocol import (
    AnyChoice,
    CountTokensRequest,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    OwnTool,
    RedactedThinkingBlock,
    ThinkingOff,
    ThinkingOn,
)
from quire.service.api.requests.chat import ChatRequest
from quire.service.text.rendering import TemplateArguments
from quire.service.text.structured import JsonSchemaFormat, NamedSchema
from quire.service.text.template import ChatTemplate
from quire.service.text.tools.protocol import ChosenFunction, ChosenTool, Function, Tool, ToolChoice

_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def prompt_request(body: CountTokensRequest, template: ChatTemplate | None) -> ChatRequest:
    """Return what decides the prompt, and what the answer must be. Raises FieldError."""
    tools = [_own_tool(tool, at) for at, tool in enumerate(body.tools or ()) if _is_own(tool)]
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
        chat_template_kwargs=TemplateArguments(enable_thinking=False)
        if _asks_for_silence(body, template)
        else None,
    )


def chat_request(body: MessagesRequest, prompt: ChatRequest, room: int) -> ChatRequest:
    """Return `prompt` with how to answer it; `room` is how many tokens an answer may have at most."""
    return msgspec.structs.replace(
        prompt,
        max_tokens=min(body.max_tokens, room),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )


def ignored_fields(body: CountTokensRequest, template: ChatTemplate | None) -> Iterator[str]:
    """Name what had no effect."""
    yield from (name for name in body.INERT if getattr(body, name, None) is not None)
    blocks = [block for message in body.messages for block in message.blocks]
    system = [] if isinstance(body.system, str) else body.system or []
    marked = any(block.cache_control for block in (*blocks, *system))
    if body.cache_control is None and (marked or any(tool.get("cache_control") for tool in body.tools or ())):
        yield "cache_control"
    if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
        yield "redacted_thinking"
    for at, tool in enumerate(body.tools or ()):
        if not _is_own(tool):
            yield tool["type"] if _TYPE.fullmatch(tool["type"]) else f"tools[{at}]"
    if body.output_config is not None and body.output_config.effort is not None:
        yield "output_config.effort"
    if isinstance(body.thinking, ThinkingOn):
        yield "thinking.budget_tokens"
    elif isinstance(body.thinking, ThinkingOff) and not _asks_for_silence(body, template):
        yield "thinking"


def _asks_for_silence(body: CountTokensRequest, template: ChatTemplate | None) -> bool:
    can_be_asked = template is not None and template.mentions("enable_thinking")
    return isinstance(body.thinking, ThinkingOff) and can_be_asked


def _is_own(tool: dict[str, Any]) -> bool:
    return not isinstance(tool.get("type"), str) or tool["type"] == "custom"


def _own_tool(given: dict[str, Any], at: int) -> Tool:
    try:
        tool = msgspec.convert(given, OwnTool)
    except msgspec.ValidationError as error:
        raise FieldError(f"tools[{at}]", f"tools[{at}]: {error}") from None
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _choice(body: CountTokensRequest, tools: list[Tool]) -> ToolChoice | None:
    match body.tool_choice:
        case NamedChoice(name=name):
            if tools and name not in {tool.function.name for tool in tools}:
                raise FieldError(
                    "tool_choice", f"tool_choice names {name!r}, which is none of the tools here"
                )
            return ChosenTool(type="function", function=ChosenFunction(name=name))
        case AnyChoice():
            return "required"
        case NoChoice():
            return "none"
    return None


def _only_one(body: CountTokensRequest) -> bool:
    return getattr(body.tool_choice, "disable_parallel_tool_use", None) is True
