"""Responses that are kept when they have ended, to be read, deleted, or gone on from by the same key."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.service.errors import ApiError, bad_value
from quire.service.shares import Shares
from quire.service.text.rendering import TemplateMessage

_OWN_BYTES = 1024  # of a response, beside its text
_ITEM_BYTES = 256  # of an item, likewise


@dataclass(frozen=True)
class StoredResponse:
    reply: bytes  # as it was answered, JSON
    conversation: list[TemplateMessage]  # up to its end
    items: dict[str, bytes]  # of its output, by id, as JSON

    @property
    def size(self) -> int:
        of_items = sum(len(item) + _ITEM_BYTES for item in self.items.values())
        return len(self.reply) + len(msgspec.json.encode(self.conversation)) + of_items + _OWN_BYTES


class ResponseStore:
    """By tenant and id, in memory. Beyond `max_bytes`, the longest unused of whoever has most goes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[tuple[str, str], StoredResponse] = {}
        self._items: dict[tuple[str, str], str] = {}  # the response of each item
        self._shares: Shares[tuple[str, str]] = Shares()

    @property
    def size(self) -> int:
        return self._shares.total

    def keep(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Those that are larger than all the room are not kept."""
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
            self._forget(*found[1])

    def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises ApiError 404."""
        found = self._kept.get((tenant, response_id))
        if found is None:
            raise ApiError(
                404,
                f"there is no response {response_id!r} of this key: it was not stored, was deleted, or has "
                "been forgotten",
                param="response_id",
                code="response_not_found",
            )
        self._shares.use(tenant, (tenant, response_id))
        return found

    def conversation(self, tenant: str, response_id: str) -> list[TemplateMessage]:
        """Return what was said up to its end. Raises ApiError 400."""
        try:
            return self.find(tenant, response_id).conversation
        except ApiError:
            raise bad_value(
                "previous_response_id",
                f"previous_response_id is {response_id!r}, and there is no such response to go on from: it "
                "is of another key or server, failed, was not stored, or has been forgotten. Send the whole "
                "conversation as input",
                "previous_response_not_found",
            ) from None

    def item(self, tenant: str, item_id: str) -> bytes | None:
        """Return an item of a stored response's output, if there is such a one."""
        response_id = self._items.get((tenant, item_id))
        return None if response_id is None else self.find(tenant, response_id).items[item_id]

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises ApiError 404."""
        self.find(tenant, response_id)
        self._forget(tenant, response_id)

    def _forget(self, tenant: str, response_id: str) -> None:
        for item in self._kept.pop((tenant, response_id)).items:
            self._items.pop((tenant, item), None)
        self._shares.remove(tenant, (tenant, response_id))
