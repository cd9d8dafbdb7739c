"""Items, of a client and of responses, as the messages that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.service.api.responses.protocol import InputItem
from quire.service.api.responses.replies import OutputItem, OutputMessage, OutputReasoning
from quire.service.errors import bad_value
from quire.service.text.rendering import TemplateMessage
from quire.service.text.tools.protocol import CalledFunction, ToolCall

_THOUGHT = {"role", "content", "reasoning_content"}  # of a message that is one's thinking so far


def with_input(history: list[TemplateMessage], given: str | list[InputItem]) -> list[TemplateMessage]:
    """Return what was said, a request's input included. Raises ApiError 400 if it answers no call."""
    if isinstance(given, str):
        return [*history, {"role": "user", "content": given}]
    messages = list(history)
    known = {call["id"] for message in history for call in message.get("tool_calls", ())}
    for at, item in enumerate(given):
        if item.type == "function_call":
            known.add(item.call_id)
            _add_call(messages, item.as_call().as_template_call())
        elif item.type == "function_call_output":
            if item.call_id not in known:
                name = f"input[{at}].call_id"
                raise bad_value(name, f"{name} is {item.call_id!r}, which no function_call before it has")
            named = {} if item.name is None else {"name": item.name}
            messages.append({"role": "tool", "content": item.text, "tool_call_id": item.call_id, **named})
        elif item.type == "reasoning":
            _add_thought(messages, item.thought)
        elif item.role == "assistant":
            _add_text(messages, item.text)
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.text})
    return messages


def with_output(history: list[TemplateMessage], output: Sequence[OutputItem]) -> list[TemplateMessage]:
    """Return what was said, a response included, but for calls that were cut: nobody can answer them."""
    messages = list(history)
    for item in output:
        if isinstance(item, OutputReasoning):
            _add_thought(messages, "".join(part.text for part in item.content))
        elif isinstance(item, OutputMessage):
            for part in item.content:
                _add_text(messages, part.text)
        elif item.status == "completed":
            function = CalledFunction(name=item.name, arguments=item.arguments)
            _add_call(messages, ToolCall(id=item.call_id, function=function).as_template_call())
    return messages


def _add_thought(messages: list[TemplateMessage], thought: str) -> None:
    if thought:
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought})


def _add_text(messages: list[TemplateMessage], text: str) -> None:
    """To the assistant's thinking before it, if there is any."""
    thought = messages.pop() if messages and set(messages[-1]) == _THOUGHT else {}
    messages.append({"role": "assistant", **thought, "content": text})


def _add_call(messages: list[TemplateMessage], call: dict[str, Any]) -> None:
    """To the assistant's message before it, if there is one: of text, or of other calls."""
    last = messages.pop() if messages and messages[-1]["role"] == "assistant" else None
    message = last or {"role": "assistant", "content": ""}
    messages.append({**message, "tool_calls": [*message.get("tool_calls", ()), call]})
