"""All streams that can be picked up again."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from service.config import ServiceConfig
from service.errors import ApiError, bad_value
from service.interruption import Interruptible
from service.resumption.recording import Recording

if TYPE_CHECKING:
    from service.answer import EventEncoder
    from service.generation import Generation

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OWN_BYTES = 4096  # of a recording, beside its events


class Recordings:
    """By tenant and the id that the client chose. Ended ones are forgotten early if they are many."""

    def __init__(self, config: ServiceConfig, working: set[Interruptible]) -> None:
        """Each recording is in `working` for as long as a drain should wait for it."""
        self._config = config
        self._working = working
        self._kept: dict[tuple[str, str], Recording] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, tenant: str, stream_id: str, generation: Generation, encoder: EventEncoder) -> Recording:
        """Raises ApiError 400, 409 or 429."""
        if not _ID.fullmatch(stream_id):
            raise bad_value("x-stream-id", "X-Stream-Id must match [A-Za-z0-9._-]{1,64}")
        if (tenant, stream_id) in self._kept:
            raise ApiError(
                409,
                f"the stream {stream_id!r} is there already: choose another X-Stream-Id, or pick it up with "
                f"GET /v1/streams/{stream_id}",
                param="x-stream-id",
                code="stream_id_in_use",
            )
        limit = self._config.max_recorded_streams
        if sum(not recording.ended for recording in self._kept.values()) >= limit:
            raise ApiError(
                429,
                f"{limit} streams that can be picked up again run already: try later, or without X-Stream-Id",
                param="x-stream-id",
                code="too_many_streams",
                retry_after=1,
            )
        recording = Recording(
            self._config.max_stream_bytes,
            self._config.resume_timeout,
            self._working,
            self._tidy,
        )
        self._kept[tenant, stream_id] = recording
        task = asyncio.get_running_loop().create_task(recording.run(generation, encoder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return recording

    def find(self, tenant: str, stream_id: str) -> Recording:
        """Raises ApiError 404."""
        found = self._kept.get((tenant, stream_id))
        if found is None:
            raise ApiError(
                404,
                f"there is no stream {stream_id!r}: it was never started with this API key, or it was "
                f"forgotten, {self._config.resume_timeout:g} s after its last reader left at the latest",
                code="stream_not_found",
            )
        return found

    def _tidy(self) -> None:
        """Forgets what is over, and the oldest that have ended, until the rest is within the limit."""
        size = 0
        for recording in self._kept.values():
            size += recording.ring.bytes + _OWN_BYTES
        for key, recording in list(self._kept.items()):
            spare = recording.ended and not recording.is_read
            if recording.over or (spare and size > self._config.max_recorded_bytes):
                size -= recording.ring.bytes + _OWN_BYTES
                del self._kept[key]
