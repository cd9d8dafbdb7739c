"""The requests of late, whose owners may ask where their time went."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.engine.records import RequestRecord
from quire.service.errors import ApiError
from quire.service.explain.times import RequestTimes, Status
from quire.service.shares import Shares

KEEP_SECONDS = 900.0
MAX_SIZE = 1 << 17  # of all together, in spans; a request takes those that it has and OWN_SIZE
OWN_SIZE = 8

_Key = tuple[str, str]  # the tenant, and the request's X-Request-Id


class PastRequests:
    """Those that run, and those that have ended, until they are too old or too many.

    A key that has many loses its own oldest ones, and nobody else's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_whole: Callable[[RequestTimes], None] | None = None  # told of each that has ended
        self._clock = clock
        self._requests: dict[_Key, RequestTimes] = {}
        self._by_number: dict[int, RequestTimes] = {}  # by the engine's numbers
        self._sizes: Shares[_Key] = Shares()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, times: RequestTimes) -> None:
        """Remember one that the engine was given, instead of another one with its X-Request-Id."""
        key = times.tenant, times.request_id
        if key in self._requests:
            self._forget(key)
        self._requests[key] = times
        self._sizes.add(times.tenant, key, OWN_SIZE)
        self._by_number.update(dict.fromkeys(times.engine_requests, times))
        self._make_room()

    def record(self, record: RequestRecord) -> None:
        """Note what the engine tells of one of its requests that has ended."""
        times = self._by_number.get(record.request_id)
        if times is None:
            return
        times.note(record)
        key = times.tenant, times.request_id
        size = self._sizes.remove(times.tenant, key)
        self._sizes.add(times.tenant, key, size + len(record.spans))
        self._tell(times)

    def end(self, times: RequestTimes, status: Status) -> None:
        """Note that nothing more is going to be sent."""
        if times.ended is None:
            times.ended, times.status = self._clock(), status
            self._tell(times)

    def _tell(self, times: RequestTimes) -> None:
        if self.on_whole is not None and times.is_whole:
            self.on_whole(times)

    def find(self, tenant: str, request_id: str) -> RequestTimes:
        """Raises ApiError 404, the same whether it is another key's or nobody's."""
        self._make_room()
        times = self._requests.get((tenant, request_id))
        if times is None or self._is_old(times):
            raise ApiError(
                404,
                f"there is no request {request_id!r} of this API key, or it was forgotten: requests are "
                f"remembered for {KEEP_SECONDS / 60:.0f} minutes, and fewer where there are many",
                code="request_not_found",
            )
        return times

    def numbers_of(self, tenant: str, request_id: str) -> list[int]:
        """Return the engine's numbers of a request; none if it is another key's, or forgotten."""
        times = self._requests.get((tenant, request_id))
        return [] if times is None else times.engine_requests

    def name_of(self, number: int, tenant: str) -> str | None:
        """Return the X-Request-Id of a request of the engine; None: it is forgotten, or another key's."""
        times = self._by_number.get(number)
        return times.request_id if times is not None and times.tenant == tenant else None

    def _make_room(self) -> None:
        """Forget those that ended long ago, and the oldest of whoever has most while there are too many."""
        while self._requests:  # one behind another that still runs is forgotten after that
            first = next(iter(self._requests))
            if not self._is_old(self._requests[first]):
                break
            self._forget(first)
        while self._sizes.total > MAX_SIZE:
            oldest = self._sizes.next_to_go(lambda key: self._requests[key].ended is None)
            if oldest is None:
                return
            self._forget(oldest[1])

    def _is_old(self, times: RequestTimes) -> bool:
        return times.ended is not None and times.ended < self._clock() - KEEP_SECONDS

    def _forget(self, key: _Key) -> None:
        times = self._requests.pop(key)
        self._sizes.remove(times.tenant, key)
        for number in times.engine_requests:
            self._by_number.pop(number, None)
