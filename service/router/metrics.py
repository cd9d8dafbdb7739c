"""The numbers behind the router's `/metrics`."""

from __future__ import annotations

from typing import get_args

from quire.service.metrics.histogram import REGISTRY_SECONDS, Histogram
from quire.service.router.placement import Placement, Reason


class RouterMetrics:
    def __init__(self) -> None:
        self.requests: dict[str, int] = dict.fromkeys(get_args(Reason), 0)
        self.retries = 0
        self.failures = {"before": 0, "during": 0}  # of requests, by whether their answer had begun
        self.lookup = Histogram(REGISTRY_SECONDS)
        # Of requests that were answered with the number of their cached tokens:
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.actual_tokens = 0

    def placed(self, placement: Placement, attempt: int) -> None:
        """Note that an attempt is made."""
        if attempt == 1:
            self.requests[placement.reason] += 1
        else:
            self.retries += 1

    def compare(self, placement: Placement, actual_tokens: int) -> None:
        """Note an answer that came back and says how many of its prompt's tokens were cached."""
        self.prompt_tokens += placement.prompt_tokens
        self.predicted_tokens += placement.predicted_tokens
        self.actual_tokens += actual_tokens
