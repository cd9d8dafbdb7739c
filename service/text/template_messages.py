"""The questions to a template's worker, and its answers."""

from __future__ import annotations

from typing import Any

import msgspec


class Model(msgspec.Struct, frozen=True):
    """The template, told to a process first."""

    template: str
    special_tokens: dict[str, str]
    max_prompt_bytes: int


class Conversation(msgspec.Struct, frozen=True):
    """A conversation that becomes a prompt."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    arguments: dict[str, Any]
    tools: list[dict[str, Any]] | None


class Rendered(msgspec.Struct, frozen=True, omit_defaults=True):
    """The prompt; or how many bytes it has, where those are too many; or what is wrong."""

    prompt: str = ""
    too_large: int = 0
    error: str = ""
