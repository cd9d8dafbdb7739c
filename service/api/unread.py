"""Fields of messages that the model's chat template shows nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire.service.api.requests.chat import Message

if TYPE_CHECKING:
    from quire.service.text.template import ChatTemplate


def unread_fields(messages: Sequence[Message], template: ChatTemplate | None) -> Iterator[str]:
    """Name those that are given in vain."""
    if template is None:
        return
    unread = [] if template.reads_names else ["name"]
    unread += [] if template.reads_thinking else ["reasoning", "reasoning_content", "thinking_blocks"]
    for field in unread:
        if any(getattr(message, field) for message in messages):
            yield f"messages[].{field}"
