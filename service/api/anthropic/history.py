"""What was said, from Anthropic's blocks to the messages of a chat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from quire.engine.errors import FieldError
from quire.service.api.anthropic.protocol import (
    AnthropicMessage,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.service.api.requests.chat import Message
from quire.service.text.tools.protocol import CalledFunction, ToolCall

# Claude Code's first line. It differs from request to request, so that no prefix would be found in the cache.
_ATTRIBUTION = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")


def system_prompt(given: str | Sequence[TextBlock] | None) -> str:
    """Return it without what only accounts for the request."""
    text = given if isinstance(given, str) else _joined(block.text for block in given or ())
    return _ATTRIBUTION.sub("", text, count=1) if _ATTRIBUTION.match(text) else text


def beginning(body: PromptFields) -> str:
    """Return how the answer begins: a last message of the assistant's is gone on from."""
    last = body.messages[-1]
    if last.role != "assistant" or not all(isinstance(block, TextBlock) for block in last.blocks):
        return ""
    return _joined(block.text for block in last.blocks if isinstance(block, TextBlock))


def chat_messages(body: PromptFields) -> list[Message]:
    """Return all but what `beginning` does. Turns of one role are one. Raises FieldError."""
    system = system_prompt(body.system)
    said = [Message(role="system", content=system)] if system else []
    turns = body.messages[:-1] if beginning(body) else body.messages
    calls: set[str] = set()
    for at, turn in enumerate(turns):
        for message in _of_turn(turn, f"messages[{at}]", calls):
            if said and said[-1].role == message.role != "tool":
                said[-1] = _together(said[-1], message)
            else:
                said.append(message)
    if not said:
        raise FieldError("messages", "messages needs one of the user: an answer's beginning answers nothing")
    return said


def _of_turn(turn: AnthropicMessage, name: str, calls: set[str]) -> Iterator[Message]:
    """What tools gave comes first, as it answers what was called before. `calls` gets those that are made.

    Few chat templates take a system message later than the first: the user's turn shows what one says.
    """
    texts, made, thinking = [], [], []
    for at, block in enumerate(turn.blocks):
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thought):
                thinking.append(thought)
            case ToolUseBlock(id=identity):
                calls.add(identity)
                arguments = msgspec.json.encode(block.input).decode()
                function = CalledFunction(name=block.name, arguments=arguments)
                made.append(ToolCall(id=identity, function=function))
            case ToolResultBlock(tool_use_id=identity):
                if identity not in calls:
                    field = f"{name}.content[{at}].tool_use_id"
                    raise FieldError(field, f"{field} is {identity!r}, which no tool_use before it has")
                yield Message(role="tool", tool_call_id=identity, content=_result(block))
    if turn.role == "system":
        yield Message(role="user", content=f"<system-reminder>\n{_joined(texts)}\n</system-reminder>")
    elif made or texts or turn.role == "assistant":
        yield Message(
            role=turn.role,
            content=_joined(texts),
            tool_calls=made or None,
            reasoning=_joined(thinking) or None,
        )


def _result(block: ToolResultBlock) -> str:
    given = block.content or ""
    text = given if isinstance(given, str) else _joined(part.text for part in given)
    return f"Error: {text}" if block.is_error else text


def _together(first: Message, second: Message) -> Message:
    texts = [message.content for message in (first, second) if isinstance(message.content, str)]
    calls = [*(first.tool_calls or ()), *(second.tool_calls or ())]
    thinking = _joined(filter(None, (first.reasoning, second.reasoning)))
    return Message(
        role=first.role,
        content=_joined(filter(None, texts)),
        tool_calls=calls or None,
        reasoning=thinking or None,
    )


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(texts)
