"""What `/metrics` tells. Plain numbers while serving; they get their names when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.config import EngineInfo, StepStats
from engine.request import FinishReason
from service.histogram import LATENCY_SECONDS, SECONDS, STEP_SECONDS, TOKENS, Histogram

PHASES = ("schedule", "launch", "wait", "commit")


class Metrics:
    """Fed by requests as they go and by the engine once a step."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.engine_info: EngineInfo | None = None
        self._stats: StepStats | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token_latency = Histogram(SECONDS)
        self.queue_time = Histogram(LATENCY_SECONDS)
        self.request_latency = Histogram(LATENCY_SECONDS)
        self._phases = {phase: Histogram(STEP_SECONDS) for phase in PHASES}
        self._step_tokens = {kind: Histogram(TOKENS) for kind in ("prefill", "decode")}

    def step(self, stats: StepStats) -> None:
        self._stats = stats
        self._phases["schedule"].observe(stats.schedule_seconds)
        self._phases["launch"].observe(stats.launch_seconds)
        self._phases["wait"].observe(stats.wait_seconds)
        self._phases["commit"].observe(stats.commit_seconds)
        self._step_tokens["prefill"].observe(stats.prefill_tokens)
        self._step_tokens["decode"].observe(stats.decode_tokens)

    def exposition(self) -> bytes:
        """Prometheus text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self))
        return generate_latest(registry)

    def families(self) -> Iterator[Metric]:
        yield from self._request_families()
        if self.engine_info is not None:
            yield from self._cache_families(self.engine_info)
        yield from self._step_families()

    def _request_families(self) -> Iterator[Metric]:
        model = {"model_name": self._model}
        yield _counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that started", (model, self.prompt_tokens)
        )
        yield _counter("vllm:generation_tokens", "Tokens generated", (model, self.generation_tokens))
        yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up", (model, self.prompt_tokens))
        yield _counter("vllm:prefix_cache_hits", "Prompt tokens found cached", (model, self.cached_tokens))
        yield _counter(
            "quire_prefix_cache_tokens",
            "Prompt tokens by where their keys and values came from",
            ({"source": "device"}, self.cached_tokens),
            ({"source": "miss"}, self.prompt_tokens - self.cached_tokens),
        )
        finished = [({**model, "finished_reason": reason}, count) for reason, count in self.finished.items()]
        yield _counter("vllm:request_success", "Requests that ended, by how", *finished)
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token", self.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Time between tokens", self.inter_token_latency),
            ("vllm:request_queue_time_seconds", "Arrival to first scheduling", self.queue_time),
            ("vllm:e2e_request_latency_seconds", "Arrival to end", self.request_latency),
        ):
            yield _histogram(name, text, (model, histogram))

    def _cache_families(self, info: EngineInfo) -> Iterator[Metric]:
        labels = {
            "model_name": self._model,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.dtype,
        }
        yield _gauge("vllm:cache_config_info", "The KV cache's shape", (labels, 1))
        yield _gauge("quire_kv_capacity_blocks", "KV blocks there are", ({"tier": "device"}, info.num_blocks))
        stats = self._stats
        if stats is None:
            return
        states = {"free": stats.free_blocks, "active": stats.active_blocks, "cached": stats.cached_blocks}
        blocks = [({"tier": "device", "state": state}, count) for state, count in states.items()]
        yield _gauge("quire_kv_blocks", "KV blocks by state", *blocks)
        slots = stats.active_blocks * info.block_size
        waste = 1 - stats.tokens_filled / slots if slots else 0.0
        yield _gauge("quire_kv_fragmentation_ratio", "Slots of active blocks that hold no token", ({}, waste))
        usage = stats.active_blocks / info.num_blocks
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield _gauge(name, "Share of KV blocks in use, 0 to 1", ({"model_name": self._model}, usage))

    def _step_families(self) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        model = {"model_name": self._model}
        requests = {"running": stats.running, "waiting": stats.waiting, "swapped": stats.swapped}
        by_state = [({"state": state}, count) for state, count in requests.items()]
        yield _gauge("quire_requests", "Requests in the engine by state", *by_state)
        for state, count in requests.items():
            yield _gauge(f"vllm:num_requests_{state}", f"Requests {state}", (model, count))
        modes = {"recompute": stats.preemptions_recompute, "swap": stats.preemptions_swap}
        by_mode = [({"mode": mode}, count) for mode, count in modes.items()]
        yield _counter("quire_preemptions", "Requests preempted by how", *by_mode)
        yield _counter("vllm:num_preemptions", "Requests preempted", (model, sum(modes.values())))
        yield _gauge("quire_kv_block_references", "References that tables hold", ({}, stats.block_references))
        yield _gauge("quire_kv_tokens_filled", "Tokens held in active blocks", ({}, stats.tokens_filled))
        yield _counter("quire_kv_copy_on_write", "Blocks copied before a write", ({}, stats.copy_on_write))
        yield _counter("quire_kv_block_allocations", "Blocks handed out", ({}, stats.block_allocations))
        yield _counter("quire_kv_block_evictions", "Cached blocks given up", ({}, stats.block_evictions))
        phases = [({"phase": phase}, histogram) for phase, histogram in self._phases.items()]
        yield _histogram("quire_step_seconds", "Time of an engine step by phase", *phases)
        kinds = [({"kind": kind}, histogram) for kind, histogram in self._step_tokens.items()]
        yield _histogram("quire_step_tokens", "Tokens computed in an engine step", *kinds)


class _Families(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()


Labels = dict[str, str]


def _counter(name: str, text: str, *samples: tuple[Labels, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def _gauge(name: str, text: str, *samples: tuple[Labels, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def _histogram(name: str, text: str, *samples: tuple[Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(samples[0][0]))
    for labels, histogram in samples:
        family.add_metric(list(labels.values()), histogram.buckets(), histogram.total)
    return family
