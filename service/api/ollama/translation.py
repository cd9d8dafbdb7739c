"""From Ollama's requests to the chat requests that they are here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from quire.engine.errors import FieldError
from quire.service.api.ollama.protocol import (
    OllamaCall,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from quire.service.api.requests.chat import ChatRequest, Message
from quire.service.text.rendering import ReasoningEffort, TemplateArguments
from quire.service.text.structured import JsonObjectFormat, JsonSchemaFormat, NamedSchema, ResponseFormat
from quire.service.text.tools.protocol import CalledFunction, ToolCall

if TYPE_CHECKING:
    from quire.service.text.template import ChatTemplate

Generating = OllamaChatRequest | OllamaGenerateRequest
_INERT = ("keep_alive", "truncate", "shift")


def chat_of(body: Generating, model: str, template: ChatTemplate | None) -> ChatRequest:
    """Return what is asked, but for how many tokens. Raises FieldError."""
    given = options(body)
    return ChatRequest(
        model=model,
        messages=_messages(body),
        tools=(body.tools or None) if isinstance(body, OllamaChatRequest) else None,
        response_format=_format(body),
        reasoning_effort=_effort(body, template),
        chat_template_kwargs=_arguments(body, template),
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=given.seed,
        repetition_penalty=given.repeat_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        stop=given.stop,
    )


def with_limit(chat: ChatRequest, body: Generating, room: int) -> ChatRequest:
    """Return `chat` with how many tokens an answer may have: at most `room`."""
    asked = options(body).num_predict or -1
    return msgspec.structs.replace(chat, max_tokens=room if asked < 0 else min(asked, room))


def options(body: Generating) -> OllamaOptions:
    return body.options or OllamaOptions()


def is_raw(body: Generating, template: ChatTemplate | None) -> bool:
    """Tell whether the prompt goes to the model as it is: if that is asked for, or there is no template."""
    return isinstance(body, OllamaGenerateRequest) and (bool(body.raw) or template is None)


def ignored_fields(body: Generating, template: ChatTemplate | None) -> Iterator[str]:
    """Name what had no effect."""
    yield from (name for name in _INERT if getattr(body, name) is not None)
    yield from (f"options.{name}" for name in OllamaOptions.INERT if getattr(options(body), name) is not None)
    asked = _effort(body, template) or (isinstance(body.think, bool) and _arguments(body, template))
    if body.think is not None and not asked:
        yield "think"


def _arguments(body: Generating, template: ChatTemplate | None) -> TemplateArguments | None:
    if body.think is None or template is None or not template.mentions("enable_thinking"):
        return None
    return TemplateArguments(enable_thinking=body.think is not False)


def _effort(body: Generating, template: ChatTemplate | None) -> ReasoningEffort | None:
    if isinstance(body.think, bool) or template is None or not template.mentions("reasoning_effort"):
        return None
    return body.think


def _format(body: Generating) -> ResponseFormat | None:
    if isinstance(body.format, dict):
        return JsonSchemaFormat(json_schema=NamedSchema(name="format", schema=body.format))
    return JsonObjectFormat() if body.format == "json" else None


def _messages(body: Generating) -> list[Message]:
    if isinstance(body, OllamaGenerateRequest):
        system = [Message(role="system", content=body.system)] if body.system else []
        return [*system, Message(role="user", content=body.prompt or "")]
    said: list[Message] = []
    open_calls: list[ToolCall] = []
    for at, message in enumerate(body.messages or ()):
        if message.role == "tool":
            call = _answered(message, f"messages[{at}]", open_calls)
            open_calls.remove(call)
            said.append(Message(role="tool", tool_call_id=call.id, content=message.content or ""))
            continue
        if message.tool_calls and message.role != "assistant":
            raise FieldError("tool_calls", f"messages[{at}].tool_calls belongs to the role 'assistant'")
        calls = [_call(call, f"call_{at}_{place}") for place, call in enumerate(message.tool_calls or ())]
        open_calls += calls
        said.append(
            Message(
                role=message.role,
                content=message.content or "",
                tool_calls=calls or None,
                reasoning=message.thinking or None,
            )
        )
    return said


def _call(call: OllamaCall, own_id: str) -> ToolCall:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return ToolCall(
        id=call.id or own_id, function=CalledFunction(name=call.function.name, arguments=arguments)
    )


def _answered(message: OllamaMessage, name: str, open_calls: list[ToolCall]) -> ToolCall:
    """Return the call that this message answers. Raises FieldError."""

    def fits(call: ToolCall) -> bool:
        if message.tool_call_id is not None:
            return call.id == message.tool_call_id
        return message.tool_name in (None, call.function.name)

    found = next(filter(fits, open_calls), None)
    if found is None:
        raise FieldError(name, f"{name} answers no call before it that has no answer")
    return found
