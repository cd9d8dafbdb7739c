"""Conversations up to a socket's latest responses, for those that go on from them."""

from __future__ import annotations

from quire.service.answer.history import History
from quire.service.shares import Shares

_OWN_BYTES = 1024  # of a conversation, beside its text


class ConversationMemory:
    """Bounds what the sockets of all tenants keep, together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shares: Shares[tuple[Conversations, str]] = Shares()

    @property
    def bytes(self) -> int:
        return self._shares.total

    def keep(self, owner: Conversations, response_id: str, size: int) -> None:
        self._shares.add(owner.tenant, (owner, response_id), size)
        while self.bytes > self._max_bytes:
            found = self._shares.next_to_go(lambda key: key == (owner, response_id))
            if found is None:
                return
            _, (other, oldest) = found
            other.forget(oldest)

    def use(self, owner: Conversations, response_id: str) -> None:
        self._shares.use(owner.tenant, (owner, response_id))

    def remove(self, owner: Conversations, response_id: str) -> None:
        self._shares.remove(owner.tenant, (owner, response_id))


class Conversations:
    """By response id. Those that have not been used for longest are forgotten when they have too many bytes.

    What conversations share is counted for each. The latest is kept whatever its size, until others need the
    memory.
    """

    def __init__(self, max_bytes: int, memory: ConversationMemory, tenant: str) -> None:
        self.tenant = tenant
        self._max_bytes = max_bytes
        self._memory = memory
        self._bytes = 0
        self._kept: dict[str, tuple[History, int]] = {}  # the longest unused first

    def keep(self, response_id: str, history: History) -> None:
        size = history.size + _OWN_BYTES
        self._kept[response_id] = (history, size)
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self.forget(next(iter(self._kept)))
        self._memory.keep(self, response_id, size)

    def forget(self, response_id: str) -> None:
        self._bytes -= self._kept.pop(response_id)[1]
        self._memory.remove(self, response_id)

    def close(self) -> None:
        """Forget all of them."""
        for response_id in list(self._kept):
            self.forget(response_id)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    def find(self, response_id: str) -> History:
        """Return one that is there, which is the latest used from now on. Raises KeyError."""
        found = self._kept[response_id] = self._kept.pop(response_id)
        self._memory.use(self, response_id)
        return found[0]
