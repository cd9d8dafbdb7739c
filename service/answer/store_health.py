"""Whether the Redis that keeps responses answers, as metrics and the log tell it."""

from __future__ import annotations

import logging
import time

from quire.service.metrics.counts import Metrics

log = logging.getLogger("quire.service")

RETRY_SECONDS = 1.0


class StoreHealth:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._away_until = 0.0

    @property
    def is_away(self) -> bool:
        """Return whether it failed a moment ago, so that it is not asked yet."""
        return time.monotonic() < self._away_until

    def failed(self, error: Exception) -> None:
        """Note that it failed, and not only on one response."""
        self._metrics.response_store_failures += 1
        self._away_until = time.monotonic() + RETRY_SECONDS
        if self._metrics.response_store == "redis":
            self._metrics.response_store = "degraded"
            log.warning(
                "Redis keeps no responses now (%s): new ones are kept in memory, and written to it once it "
                "answers",
                error,
            )

    def refused(self) -> None:
        """Note that it answers, but did not take a response."""
        self._metrics.response_store_failures += 1

    def gave_up(self, response_id: str, error: Exception) -> None:
        """Note that it answers, and did not take a response several times."""
        self._metrics.responses_not_written += 1
        log.warning(
            "Redis answers, but does not take the response %s (%s): it stays in the memory of this server "
            "alone, until it is forgotten there",
            response_id,
            error,
        )

    def answered(self) -> None:
        self._away_until = 0.0
        if self._metrics.response_store == "degraded":
            self._metrics.response_store = "redis"
            log.info("Redis keeps responses again")
