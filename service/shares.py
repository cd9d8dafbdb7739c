"""Shares of tenants in something that is bounded for all together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Shares(Generic[K]):
    """Sizes by tenant and key. Room is made at the cost of whoever has most: nobody pushes others out."""

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[str, dict[K, int]] = {}  # the longest unused first
        self._totals: dict[str, int] = {}

    def add(self, tenant: str, key: K, size: int) -> None:
        self._sizes.setdefault(tenant, {})[key] = size
        self._totals[tenant] = self._totals.get(tenant, 0) + size
        self.total += size

    def remove(self, tenant: str, key: K) -> int:
        """Return its size."""
        sizes = self._sizes[tenant]
        size = sizes.pop(key)
        self._totals[tenant] -= size
        self.total -= size
        if not sizes:
            del self._sizes[tenant], self._totals[tenant]
        return size

    def use(self, tenant: str, key: K) -> None:
        """Make it the latest."""
        sizes = self._sizes[tenant]
        sizes[key] = sizes.pop(key)

    def next_to_go(self, is_spared: Callable[[K], bool]) -> tuple[str, K] | None:
        """Return the longest unused of whoever has most, of those that are not spared; None if all are."""
        for tenant in sorted(self._totals, key=self._totals.__getitem__, reverse=True):
            for key in self._sizes[tenant]:
                if not is_spared(key):
                    return tenant, key
        return None
