"""What was said up to the end of a response, for one that goes on from it."""

from __future__ import annotations

import msgspec

from quire.service.text.rendering import TemplateMessage

_PLACE_BYTES = 96  # of an item's name, and of a turn's


class Turn(msgspec.Struct, frozen=True):
    """A response by id, with its items by id: those of its input, and then those of its output."""

    response_id: str
    items: list[str]


class History(msgspec.Struct, frozen=True):
    messages: list[TemplateMessage] = []
    turns: list[Turn] = []  # the oldest first

    @property
    def size(self) -> int:
        of_turns = sum(_PLACE_BYTES * (1 + len(turn.items)) for turn in self.turns)
        return len(msgspec.json.encode(self.messages)) + of_turns
