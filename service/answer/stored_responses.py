"""Responses that are kept when they have ended, to be read, deleted, or gone on from by the same key."""

from __future__ import annotations

import msgspec

from quire.service.answer.history import History, Turn
from quire.service.shares import Shares
from quire.service.text.rendering import TemplateMessage

_OWN_BYTES = 1024  # of a response, beside its text
_ITEM_BYTES = 256  # of an item, likewise


class StoredResponse(msgspec.Struct, frozen=True):
    reply: bytes  # as it was answered, JSON
    conversation: list[TemplateMessage]  # up to its end
    items: dict[str, bytes]  # of its output, by id, as JSON
    inputs: list[tuple[str, bytes]] = []  # the items of its input, likewise; two may have one id
    before: list[Turn] = []  # what it goes on from, the oldest first

    @property
    def size(self) -> int:
        of_items = sum(len(item) + _ITEM_BYTES for item in self.all_items)
        return len(self.reply) + History(self.conversation, self.before).size + of_items + _OWN_BYTES

    @property
    def all_items(self) -> list[bytes]:
        """Return the items of its input, and then those of its output."""
        return [*(item for _, item in self.inputs), *self.items.values()]

    def history(self, response_id: str) -> History:
        """Return what one that goes on from it, which has this id, goes on from."""
        own = Turn(response_id, [*(name for name, _ in self.inputs), *self.items])
        return History(self.conversation, [*self.before, own])


class ResponseStore:
    """By tenant and id, in memory. Beyond `max_bytes`, the longest unused of whoever has most goes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[tuple[str, str], StoredResponse] = {}
        self._items: dict[tuple[str, str], str] = {}  # the response of each item
        self._shares: Shares[tuple[str, str]] = Shares()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        return self._shares.total

    def keep(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Keep it, unless it is larger than all the room."""
        size = response.size
        if size > self._max_bytes:
            return
        own = (tenant, response_id)
        self._kept[own] = response
        self._items.update({(tenant, item): response_id for item in response.items})
        self._shares.add(tenant, own, size)
        while self.size > self._max_bytes:
            found = self._shares.next_to_go(lambda key: key == own)
            if found is None:
                return
            self.forget(*found[1])

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        found = self._kept.get((tenant, response_id))
        if found is not None:
            self._shares.use(tenant, (tenant, response_id))
        return found

    def has(self, tenant: str, response_id: str) -> bool:
        return (tenant, response_id) in self._kept

    def response_of(self, tenant: str, item_id: str) -> str | None:
        """Return the response that has an item in its output."""
        return self._items.get((tenant, item_id))

    def forget(self, tenant: str, response_id: str) -> bool:
        """Return whether it was there."""
        found = self._kept.pop((tenant, response_id), None)
        if found is None:
            return False
        for item in found.items:
            self._items.pop((tenant, item), None)
        self._shares.remove(tenant, (tenant, response_id))
        return True
