"""Prompts that wait for their first token: how many may, and when to come back if there are too many."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.service.config import ServiceConfig
from quire.service.errors import ApiError, bad_value
from quire.service.explain.past_requests import PastRequests
from quire.service.metrics.counts import Metrics
from quire.service.watchdog import Watchdog

_UNKNOWN_RETRY_SECONDS = 10
_LATE_STARTS = 64  # the rate of late is that of so many


class QueueLimits:
    """Bounded in prompts and in their tokens; what is not tokenised yet counts by its bytes, apart."""

    def __init__(self, config: ServiceConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.prompts = 0
        self.tokens = 0
        self._untokenised = 0  # prompts
        self._bytes = 0  # of those
        self._starts: deque[float] = deque(maxlen=_LATE_STARTS)  # when the latest first tokens came

    def check(self, prompts: int, tokens: int = 0, param: str = "prompt") -> None:
        """Raises ApiError 429 if so many more do not fit, or 400 if so many never do.

        Of tokens, an empty line takes those of any one request. param: the field that holds the prompts.
        """
        limit, waiting = self._config.max_num_queued_reqs, self.prompts + self._untokenised
        if prompts > limit:
            raise bad_value(
                param,
                f"{param} holds {prompts} prompts, and the queue at most {limit}: send fewer at once",
            )
        if waiting + prompts > limit:
            raise self._full(f"{waiting} prompts wait and {prompts} more do not fit into {limit}")
        limit = self._config.max_num_queued_tokens
        if self.tokens and self.tokens + tokens > limit:
            raise self._full(
                f"prompts of {self.tokens} tokens wait and {tokens} more do not fit into {limit}"
            )

    def enter(self, tokens: int) -> None:
        self.prompts += 1
        self.tokens += tokens

    def start(self, tokens: int) -> None:
        """Note that the first token of one has come."""
        self.leave(tokens)
        self._starts.append(self._clock())

    def leave(self, tokens: int) -> None:
        self.prompts -= 1
        self.tokens -= tokens

    @contextmanager
    def tokenising(self, size: int) -> Iterator[None]:
        """While a prompt of `size` bytes is tokenised elsewhere. Raises ApiError 429."""
        self.check(1)
        limit = self._config.max_untokenised_bytes
        if self._bytes and self._bytes + size > limit:
            raise self._full(
                f"{self._bytes} bytes wait to be tokenised and {size} more do not fit into {limit}"
            )
        self._untokenised += 1
        self._bytes += size
        try:
            yield
        finally:
            self._untokenised -= 1
            self._bytes -= size

    def _full(self, why: str) -> ApiError:
        return ApiError(429, f"the queue is full: {why}", code="queue_full", retry_after=self._retry_after())

    def _retry_after(self) -> int:
        """Return the seconds until, at the rate of late, half of the line will have started; 1 to 60."""
        if len(self._starts) < 2:
            return _UNKNOWN_RETRY_SECONDS
        rate = (len(self._starts) - 1) / max(self._clock() - self._starts[0], 1e-3)
        return min(60, max(1, math.ceil(self.prompts / 2 / rate)))


@dataclass(frozen=True)
class Admission:
    """By whom a request is counted, queued, watched and remembered while the engine works on it."""

    metrics: Metrics
    queue: QueueLimits
    watchdog: Watchdog
    past_requests: PastRequests
