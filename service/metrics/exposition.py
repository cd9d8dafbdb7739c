"""The metrics in Prometheus' text format. Imported when first asked for: prometheus_client imports slowly."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire.engine.config import EngineInfo, StepStats
from quire.service.metrics.counts import Metrics
from quire.service.metrics.families import counter, encode, gauge, histogram, loop_families
from quire.service.metrics.loop_watch import LoopWatch


def exposition(
    metrics: Metrics, info: EngineInfo | None, loop_watch: LoopWatch, accept: str = ""
) -> tuple[bytes, str]:
    """Return all families and their media type, which goes by the header Accept.

    Those of the cache and of steps need `info`, which comes with the engine.
    """
    return encode(_Families(metrics, info, loop_watch), accept)


class _Families(Collector):
    def __init__(self, metrics: Metrics, info: EngineInfo | None, loop_watch: LoopWatch) -> None:
        self._metrics = metrics
        self._info = info
        self._loop_watch = loop_watch

    def collect(self) -> Iterator[Metric]:
        yield from self._request_families()
        if self._info is not None:
            stats = self._metrics.stats or _idle(self._info)
            yield from self._cache_families(self._info, stats)
            yield from self._step_families(stats)
        yield from self._registry_families()
        yield from self._response_families()
        yield from loop_families(self._loop_watch)

    def _request_families(self) -> Iterator[Metric]:
        model = {"model_name": self._metrics.model}
        yield counter(
            "vllm:prompt_tokens",
            "Prompt tokens of requests that started",
            (model, self._metrics.prompt_tokens),
        )
        yield counter("vllm:generation_tokens", "Tokens generated", (model, self._metrics.generation_tokens))
        yield counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up", (model, self._metrics.prompt_tokens)
        )
        yield counter(
            "vllm:prefix_cache_hits", "Prompt tokens found cached", (model, self._metrics.cached_tokens)
        )
        yield counter(
            "quire_prefix_cache_tokens",
            "Prompt tokens by where their keys and values came from",
            ({"source": "device"}, self._metrics.cached_tokens - self._metrics.cached_host_tokens),
            ({"source": "host"}, self._metrics.cached_host_tokens),
            ({"source": "miss"}, self._metrics.prompt_tokens - self._metrics.cached_tokens),
        )
        finished = [
            ({**model, "finished_reason": reason}, count) for reason, count in self._metrics.finished.items()
        ]
        yield counter(
            "vllm:request_success",
            "Requests that ended, each prompt of a list for one, by how their last choice did",
            *finished,
        )
        answers = [
            ({"endpoint": endpoint, "status": str(status)}, count)
            for (endpoint, status), count in sorted(self._metrics.answers.items())
        ]
        yield counter(
            "quire_http_requests",
            "Requests by endpoint and status (0: the client left before there was one)",
            *answers,
        )
        for name, text, latencies in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token", self._metrics.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Time between tokens", self._metrics.inter_token_latency),
            ("vllm:request_queue_time_seconds", "Arrival to first scheduling", self._metrics.queue_time),
            ("vllm:e2e_request_latency_seconds", "Arrival to end", self._metrics.request_latency),
        ):
            yield histogram(name, text, (model, latencies))

    def _cache_families(self, info: EngineInfo, stats: StepStats) -> Iterator[Metric]:
        labels = {
            "model_name": self._metrics.model,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "num_cpu_blocks": str(info.num_host_blocks),
            "cache_dtype": info.kv_cache_dtype,
        }
        yield gauge("vllm:cache_config_info", "The KV cache's shape", (labels, 1))
        model = {"model_name": self._metrics.model}
        adapters = {**model, "max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield gauge("vllm:lora_requests_info", "Adapters in use: there are none", (adapters, 1))
        capacity = {"device": info.num_blocks, "host": info.num_host_blocks}
        by_tier = [({"tier": tier}, count) for tier, count in capacity.items()]
        yield gauge("quire_kv_capacity_blocks", "KV blocks there are", *by_tier)
        states = {
            ("device", "free"): stats.free_blocks,
            ("device", "active"): stats.active_blocks,
            ("device", "cached"): stats.cached_blocks,
            ("host", "free"): stats.host_free_blocks,
            ("host", "active"): stats.host_active_blocks,
            ("host", "cached"): stats.host_cached_blocks,
        }
        yield gauge(
            "quire_kv_blocks",
            "KV blocks by state. A block in transfer between the tiers is in none: the sum may be less than "
            "the capacity for a moment",
            *(({"tier": tier, "state": state}, count) for (tier, state), count in states.items()),
        )
        pinned = info.num_pinned_blocks
        yield gauge("quire_kv_pinned_blocks", "Blocks of --pin-prefix: cached or active", ({}, pinned))
        swapped = {"out": stats.swap_out_blocks, "in": stats.swap_in_blocks}
        for name, unit, scale in (
            ("quire_kv_swap_blocks", "Blocks", 1),
            ("quire_kv_swap_bytes", "Bytes", info.bytes_per_block * info.tensor_parallel_size),
        ):
            yield counter(
                name,
                f"{unit} copied between device and host memory; out: to the host, spilled cached ones too",
                *(({"direction": direction}, count * scale) for direction, count in swapped.items()),
            )
        memory = enumerate(info.rank_memory_bytes)
        yield gauge(
            "quire_rank_memory_bytes",
            "Memory that each rank had taken of its device when it had started",
            *(({"rank": str(rank)}, taken) for rank, taken in memory),
        )
        yield gauge(
            "quire_all_reduce_seconds",
            "Sum of a token's hidden states over the ranks, as timed at start; 0 with one rank",
            ({}, info.all_reduce_seconds),
        )
        yield gauge(
            "quire_kv_behind_window_blocks",
            "Blocks of running sequences that layers with windows have given back",
            ({}, stats.behind_window_blocks),
        )
        slots = stats.active_blocks * info.block_size
        waste = 1 - stats.tokens_filled / slots if slots else 0.0
        yield gauge("quire_kv_fragmentation_ratio", "Slots of active blocks that hold no token", ({}, waste))
        usage = stats.active_blocks / info.num_blocks
        host_usage = stats.host_active_blocks / max(info.num_host_blocks, 1)
        for name, tier, share in (
            ("vllm:kv_cache_usage_perc", "KV", usage),
            ("vllm:gpu_cache_usage_perc", "KV", usage),
            ("vllm:cpu_cache_usage_perc", "host KV", host_usage),
        ):
            yield gauge(
                name, f"Share of {tier} blocks in use, 0 to 1", ({"model_name": self._metrics.model}, share)
            )

    def _step_families(self, stats: StepStats) -> Iterator[Metric]:
        model = {"model_name": self._metrics.model}
        requests = {"running": stats.running, "waiting": stats.waiting, "swapped": stats.swapped}
        by_state = [({"state": state}, count) for state, count in requests.items()]
        yield gauge("quire_requests", "Requests in the engine by state", *by_state)
        held = stats.requests_in_memory
        yield gauge(
            "quire_requests_in_memory",
            "Requests the engine holds anything of, ended ones too",
            ({}, held),
        )
        for state, count in requests.items():
            yield gauge(f"vllm:num_requests_{state}", f"Requests {state}", (model, count))
        modes = {"recompute": stats.preemptions_recompute, "swap": stats.preemptions_swap}
        by_mode = [({"mode": mode}, count) for mode, count in modes.items()]
        yield counter("quire_preemptions", "Requests preempted by how", *by_mode)
        yield counter("vllm:num_preemptions", "Requests preempted", (model, sum(modes.values())))
        yield gauge("quire_kv_block_references", "References that tables hold", ({}, stats.block_references))
        yield gauge("quire_kv_tokens_filled", "Tokens held in active blocks", ({}, stats.tokens_filled))
        yield counter("quire_kv_copy_on_write", "Blocks copied before a write", ({}, stats.copy_on_write))
        yield counter("quire_kv_block_allocations", "Blocks handed out", ({}, stats.block_allocations))
        yield counter("quire_kv_block_evictions", "Cached blocks given up", ({}, stats.block_evictions))
        phases = [({"phase": phase}, histogram) for phase, histogram in self._metrics.phases.items()]
        yield histogram("quire_step_seconds", "Time of an engine step by phase", *phases)
        kinds = [({"kind": kind}, histogram) for kind, histogram in self._metrics.step_tokens.items()]
        yield histogram("quire_step_tokens", "Tokens computed in an engine step", *kinds)

    def _registry_families(self) -> Iterator[Metric]:
        metrics, report = self._metrics, self._metrics.registry
        state = "off" if report is None else report.state
        by_state = [({"state": name}, float(name == state)) for name in ("ok", "degraded", "off")]
        yield gauge("quire_registry_state", "Whether the registry is told what this replica holds", *by_state)
        yield histogram(
            "quire_registry_publish_seconds", "Time of a publication", ({}, metrics.registry_publish)
        )
        dropped = 0 if report is None else report.dropped
        yield counter(
            "quire_registry_dropped",
            "Changes that found the buffer full; all blocks were then published anew",
            ({}, dropped),
        )
        lag = 0.0 if report is None else report.lag_seconds
        yield gauge("quire_registry_lag_seconds", "Age of the oldest unpublished change", ({}, lag))
        blocks = 0 if report is None else report.blocks
        yield gauge("quire_registry_blocks", "Blocks that the registry knows of", ({}, blocks))

    def _response_families(self) -> Iterator[Metric]:
        state = self._metrics.response_store
        by_state = [({"state": name}, float(name == state)) for name in ("memory", "redis", "degraded")]
        text = "Where responses are kept; degraded: Redis is away"
        yield gauge("quire_response_store_state", text, *by_state)
        text = "Times that Redis did not answer for a kept response"
        yield counter("quire_response_store_failures", text, ({}, self._metrics.response_store_failures))
        text = "Responses that Redis does not take, though it answers; they stay in memory"
        yield counter("quire_responses_not_written", text, ({}, self._metrics.responses_not_written))


def _idle(info: EngineInfo) -> StepStats:
    """Before the first step, so that alerts and autoscalers see an idle replica and not a missing one."""
    nothing = dict.fromkeys(StepStats.__struct_fields__, 0)
    return StepStats(**{**nothing, "free_blocks": info.num_blocks, "host_free_blocks": info.num_host_blocks})
