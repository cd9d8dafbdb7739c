"""Earlier messages as a chat template wants them, where templates differ from one another."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_CONCATENATED = re.compile(r"arguments'?\]?\s*\+|\+\s*[\w.\[\]']*arguments'?\]?\s*[+}%]")
_ID_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NO_SYSTEM = {"role": "system", "content": ""}


def as_wanted(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return messages as the template `source` reads them."""
    for change in _changes(source):
        messages = [change(message) for message in messages]
    if "<|tool_call_argument_begin|>" in source:
        messages = _with_counted_ids(messages)
    if tools and "message['tools']" in source:
        messages = _with_tools(messages, tools)
    return messages


@lru_cache(maxsize=8)
def _changes(source: str) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], ...]:
    changes = []
    if ".thinking" in source and "reasoning_content" not in source:  # gpt-oss
        changes.append(_renamed)
    if "[TOOL_CALLS]" in source:  # Mistral's take ids of nine letters and digits only
        changes.append(_with_short_ids)
    if _CONCATENATED.search(source):  # DeepSeek's put the arguments into the prompt as they are
        changes.append(_with_argument_text)
    return tuple(changes)


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    if "reasoning_content" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**rest, "thinking": message["reasoning_content"]}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_calls" in message:
        changed["tool_calls"] = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    return changed


def _short(call_id: str) -> str:
    """Return a short id, the same for the same one."""
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8])
    return "".join(_ID_DIGITS[number // 62**at % 62] for at in range(9))


def _with_counted_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give calls ids like Kimi's functions.name:0, which count them; its template shows no other names."""
    counted: dict[str, str] = {}
    changed = []
    for message in messages:
        calls = message.get("tool_calls", ())
        for call in calls:
            counted[call["id"]] = f"functions.{call['function']['name']}:{len(counted)}"
        ids: dict[str, Any] = {}
        if calls:
            ids["tool_calls"] = [{**call, "id": counted[call["id"]]} for call in calls]
        if "tool_call_id" in message:
            ids["tool_call_id"] = counted.get(message["tool_call_id"], message["tool_call_id"])
        changed.append(message | ids)
    return changed


def _with_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the tools' text in the system's message, where Phi-4-mini's template takes it from."""
    said = messages if messages and messages[0]["role"] == "system" else [_NO_SYSTEM, *messages]
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**said[0], "tools": text}, *said[1:]]


def _with_argument_text(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}
