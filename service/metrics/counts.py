"""The numbers behind `/metrics`; quire.service.metrics.exposition gives them their names."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from quire.engine.config import RegistryReport, StepStats
from quire.engine.messages import FinishReason
from quire.service.metrics.histogram import (
    LATENCY_SECONDS,
    REGISTRY_SECONDS,
    SECONDS,
    STEP_SECONDS,
    TOKENS,
    Histogram,
)

PHASES = ("schedule", "launch", "wait", "commit")


class Metrics:
    """Fed by requests as they go and by the engine once a step."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.stats: StepStats | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.cached_host_tokens = 0  # of those, from blocks in host memory
        self.generation_tokens = 0
        self.finished: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.answers: Counter[tuple[str, int]] = Counter({("other", 404): 0})  # by endpoint, status
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token_latency = Histogram(SECONDS)
        self.queue_time = Histogram(LATENCY_SECONDS)
        self.request_latency = Histogram(LATENCY_SECONDS)
        self.phases = {phase: Histogram(STEP_SECONDS) for phase in PHASES}
        self.registry: RegistryReport | None = None  # None: there is none
        self.registry_publish = Histogram(REGISTRY_SECONDS)
        self.response_store: Literal["memory", "redis", "degraded"] = "memory"
        self.response_store_failures = 0  # of Redis
        self.responses_not_written = 0  # since Redis does not take them, though it answers
        self.step_tokens = {kind: Histogram(TOKENS) for kind in ("prefill", "decode")}

    def answered(self, endpoint: str, status: int) -> None:
        self.answers[endpoint, status] += 1

    def step(self, stats: StepStats) -> None:
        self.stats = stats
        self.phases["schedule"].observe(stats.schedule_seconds)
        self.phases["launch"].observe(stats.launch_seconds)
        self.phases["wait"].observe(stats.wait_seconds)
        self.phases["commit"].observe(stats.commit_seconds)
        self.step_tokens["prefill"].observe(stats.prefill_tokens)
        self.step_tokens["decode"].observe(stats.decode_tokens)

    def registry_report(self, report: RegistryReport) -> None:
        self.registry = report
        for seconds in report.publish_seconds:
            self.registry_publish.observe(seconds)
