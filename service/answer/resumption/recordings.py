"""All streams that can be picked up again."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from functools import partial

from quire.service.answer.encoder import EventEncoder
from quire.service.answer.generation import Generation
from quire.service.answer.resumption.recording import Recording
from quire.service.config import ServiceConfig
from quire.service.errors import ApiError, bad_value
from quire.service.http.cancellation import Interruptible
from quire.service.keys import KeyRing
from quire.service.shares import Shares

STREAM_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OWN_BYTES = 4096  # of a recording, beside its events
_SHARE = 4  # a key may have so much less than all streams that run, where there are several keys

_Key = tuple[str, str]  # the tenant, and the id that the client chose


class Recordings:
    """The recordings of all. Ended ones are forgotten early if they are many, first those of who has most."""

    def __init__(self, config: ServiceConfig, keys: KeyRing, working: set[Interruptible]) -> None:
        """Each recording is in `working` for as long as a drain should wait for it."""
        self._config = config
        self._keys = keys
        self._working = working
        self._running: dict[_Key, Recording] = {}
        self._running_of: Counter[str] = Counter()  # how many each tenant has
        self._ended: dict[_Key, Recording] = {}
        self._ended_sizes: Shares[_Key] = Shares()  # the first that ended first
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, tenant: str, stream_id: str, generation: Generation, encoder: EventEncoder) -> Recording:
        """Raises ApiError 400, 409 or 429."""
        key = self._new_key(tenant, stream_id)
        recording = Recording(
            self._config.max_stream_bytes,
            self._config.resume_timeout,
            self._working,
            partial(self._end, key),
            partial(self._forget, key),
        )
        self._running[key] = recording
        self._running_of[tenant] += 1
        task = asyncio.get_running_loop().create_task(recording.run(generation, encoder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return recording

    def _new_key(self, tenant: str, stream_id: str) -> _Key:
        if not STREAM_ID.fullmatch(stream_id):
            raise bad_value("x-stream-id", "X-Stream-Id must match [A-Za-z0-9._-]{1,64}")
        key = tenant, stream_id
        if key in self._running or key in self._ended:
            raise ApiError(
                409,
                f"the stream {stream_id!r} is there already: choose another X-Stream-Id, or pick it up with "
                f"GET /v1/streams/{stream_id}",
                param="x-stream-id",
                code="stream_id_in_use",
            )
        self._check_room(tenant)
        return key

    def _check_room(self, tenant: str) -> None:
        """Raises ApiError 429."""
        limit = self._config.max_recorded_streams
        share = max(1, limit // _SHARE) if len(self._keys) > 1 else limit
        if self._running_of[tenant] < share and len(self._running) < limit:
            return
        who = f"{share} streams of this key" if self._running_of[tenant] >= share else f"{limit} streams"
        raise ApiError(
            429,
            f"{who} that can be picked up again run already: try later, or without X-Stream-Id",
            param="x-stream-id",
            code="too_many_streams",
            retry_after=1,
        )

    def find(self, tenant: str, stream_id: str) -> Recording:
        """Raises ApiError 404."""
        key = tenant, stream_id
        found = self._running.get(key) or self._ended.get(key)
        if found is None:
            raise ApiError(
                404,
                f"there is no stream {stream_id!r}: it was never started with this API key, or it was "
                f"forgotten, {self._config.resume_timeout:g} s after its last reader left at the latest",
                code="stream_not_found",
            )
        return found

    def _end(self, key: _Key, recording: Recording) -> None:
        if self._running.get(key) is not recording:  # it is forgotten already
            return
        self._ended[key] = self._end_running(key)
        self._ended_sizes.add(key[0], key, _size(recording))
        running = sum(map(_size, self._running.values()))
        while self._ended_sizes.total + running > self._config.max_recorded_bytes:
            oldest = self._ended_sizes.next_to_go(lambda each: self._ended[each].is_read)
            if oldest is None:
                return
            self._forget(oldest[1], self._ended[oldest[1]])

    def _end_running(self, key: _Key) -> Recording:
        self._running_of[key[0]] -= 1
        if not self._running_of[key[0]]:
            del self._running_of[key[0]]
        return self._running.pop(key)

    def _forget(self, key: _Key, recording: Recording) -> None:
        if self._running.get(key) is recording:
            self._end_running(key)
        elif self._ended.get(key) is recording:
            del self._ended[key]
            self._ended_sizes.remove(key[0], key)


def _size(recording: Recording) -> int:
    return recording.ring.bytes + _OWN_BYTES
