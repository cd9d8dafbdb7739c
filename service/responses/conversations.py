"""What was said up to a socket's latest responses, for those that go on from them."""

from __future__ import annotations

import msgspec

from service.errors import bad_value
from service.rendering import TemplateMessage

_OWN_BYTES = 1024  # of a conversation, beside its text


class Conversations:
    """By response id. Those that have not been used for longest are forgotten when they have too many bytes.

    What conversations share is counted for each. The latest is kept whatever its size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: dict[str, tuple[list[TemplateMessage], int]] = {}  # the longest unused first

    def keep(self, response_id: str, messages: list[TemplateMessage]) -> None:
        size = len(msgspec.json.encode(messages)) + _OWN_BYTES
        self._kept[response_id] = (messages, size)
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._bytes -= self._kept.pop(oldest)[1]

    def find(self, response_id: str) -> list[TemplateMessage]:
        """Raises ApiError 400."""
        found = self._kept.pop(response_id, None)
        if found is None:
            raise bad_value(
                "previous_response_id",
                f"there is no response {response_id!r} to go on from: it is not of this WebSocket, failed, "
                "or has been forgotten. Send the whole conversation as input",
                "previous_response_not_found",
            )
        self._kept[response_id] = found
        return found[0]
