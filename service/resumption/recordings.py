"""All streams that can be picked up again."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import TYPE_CHECKING

from service.config import ServiceConfig
from service.errors import ApiError, bad_value
from service.interruption import Interruptible
from service.resumption.recording import Recording

if TYPE_CHECKING:
    from service.answer import EventEncoder
    from service.generation import Generation

STREAM_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OWN_BYTES = 4096  # of a recording, beside its events

_Key = tuple[str, str]  # the tenant, and the id that the client chose


class Recordings:
    """Those that have ended are forgotten early if they are many."""

    def __init__(self, config: ServiceConfig, working: set[Interruptible]) -> None:
        """Each recording is in `working` for as long as a drain should wait for it."""
        self._config = config
        self._working = working
        self._running: dict[_Key, Recording] = {}
        self._ended: dict[_Key, Recording] = {}  # the first that ended first
        self._ended_bytes = 0
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
        limit = self._config.max_recorded_streams
        if len(self._running) >= limit:
            raise ApiError(
                429,
                f"{limit} streams that can be picked up again run already: try later, or without X-Stream-Id",
                param="x-stream-id",
                code="too_many_streams",
                retry_after=1,
            )
        return key

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
        self._ended[key] = self._running.pop(key)
        self._ended_bytes += _size(recording)
        excess = self._ended_bytes + sum(map(_size, self._running.values())) - self._config.max_recorded_bytes
        if excess > 0:
            self._forget_ended(excess)

    def _forget_ended(self, size: int) -> None:
        """The oldest that nobody reads, of so many bytes together."""
        for key, recording in list(self._ended.items()):
            if size <= 0:
                return
            if not recording.is_read:
                self._forget(key, recording)
                size -= _size(recording)

    def _forget(self, key: _Key, recording: Recording) -> None:
        if self._running.get(key) is recording:
            del self._running[key]
        elif self._ended.get(key) is recording:
            del self._ended[key]
            self._ended_bytes -= _size(recording)


def _size(recording: Recording) -> int:
    return recording.ring.bytes + _OWN_BYTES
