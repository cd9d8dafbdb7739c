"""What the dashboard shows: panels as plain data, each with the PromQL that feeds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HERE = 'job=~"$job", instance=~"$instance"'  # Grafana's variables: the servers that were chosen
WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is Grafana's id of it; `stacked` adds the series up."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    top: float | None = None  # of the axis


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """Sum of a counter's rates, of all servers or apart `by` labels."""
    selector = f"{labels}, {HERE}" if labels else HERE
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{selector}}}[{WINDOW}]))"


def total(metric: str, labels: str = "", by: str = "") -> str:
    """Sum of a gauge."""
    selector = f"{labels}, {HERE}" if labels else HERE
    return f"sum{f' by ({by})' if by else ''} ({metric}{{{selector}}})"


def quantiles(metric: str, *percents: int) -> tuple[Query, ...]:
    buckets = rate(f"{metric}_bucket", by="le")
    return tuple(Query(f"histogram_quantile({p / 100}, {buckets})", f"p{p}") for p in percents)


def mean(metric: str, by: str) -> str:
    """Of a histogram's observations."""
    return f"{rate(f'{metric}_sum', by=by)} / {rate(f'{metric}_count', by=by)}"


IN_USE = total("quire_kv_blocks", 'tier="device", state="active"')
CAPACITY = total("quire_kv_capacity_blocks", 'tier="device"')
IN_USE_BY_TIER = total("quire_kv_blocks", 'state="active"', "tier")
IN_USE_BY_SERVER = total("quire_kv_blocks", 'tier="device", state="active"', "instance")
HIT_RATIO = f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}"
TTFT = "vllm:time_to_first_token_seconds"


def _stat(title: str, description: str, unit: str, expr: str) -> Panel:
    return Panel(title, description, unit, (Query(expr),), "stat")


OVERVIEW = (
    _stat(
        "KV occupancy",
        "Device blocks that requests hold.",
        "percentunit",
        f"{IN_USE} / {CAPACITY}",
    ),
    _stat("Running", "Sequences in the batch.", "short", total("quire_requests", 'state="running"')),
    _stat(
        "Waiting", "Requests that no step has taken yet.", "short", total("quire_requests", 'state="waiting"')
    ),
    _stat("Generated", "Tokens per second.", "suffix: tok/s", rate("vllm:generation_tokens_total")),
    _stat("TTFT p95", "Arrival to first token.", "s", quantiles(TTFT, 95)[0].expr),
    _stat("Prefix hits", "Prompt tokens found cached.", "percentunit", HIT_RATIO),
)

KV_CACHE = (
    Panel(
        "Device blocks",
        "Active: in some block table. Cached: nobody's, and found again by content. In transfer: in none.",
        "short",
        (Query(total("quire_kv_blocks", 'tier="device"', "state"), "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Host blocks",
        "Active: of swapped requests. Cached: spilled from the device.",
        "short",
        (Query(total("quire_kv_blocks", 'tier="host"', "state"), "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Occupancy",
        "Share of a tier's blocks that requests hold. Near 1 with requests waiting: memory is the limit.",
        "percentunit",
        (
            Query(
                f"{IN_USE_BY_TIER} / ({total('quire_kv_capacity_blocks', by='tier')} > 0)",
                "{{tier}}",
            ),
        ),
        top=1,
    ),
    Panel(
        "Internal fragmentation",
        "Slots of active blocks that hold no token: less than one block a sequence.",
        "percentunit",
        (Query(f"quire_kv_fragmentation_ratio{{{HERE}}}", "{{instance}}"),),
    ),
    Panel(
        "Sharing",
        "Block tables that name an active block, on average. 1: nothing is shared.",
        "suffix:×",
        (
            Query(
                f"{total('quire_kv_block_references', by='instance')} / ({IN_USE_BY_SERVER} > 0)",
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "Block turnover",
        "Blocks handed out, cached ones given up for it, and shared ones copied before a write.",
        "suffix: /s",
        (
            Query(rate("quire_kv_block_allocations_total"), "allocated"),
            Query(rate("quire_kv_block_evictions_total"), "evicted"),
            Query(rate("quire_kv_copy_on_write_total"), "copied on write"),
        ),
    ),
    Panel(
        "Swap",
        "Between device and host; out includes cached blocks that were spilled.",
        "Bps",
        (Query(rate("quire_kv_swap_bytes_total", by="direction"), "{{direction}}"),),
    ),
    Panel(
        "Preemptions",
        "Requests that gave up their blocks for older ones.",
        "suffix: /s",
        (Query(rate("quire_preemptions_total", by="mode"), "{{mode}}"),),
    ),
)

PREFIXES = (
    Panel(
        "Prompt tokens by source",
        "Found on the device, found in host memory, or computed.",
        "suffix: tok/s",
        (Query(rate("quire_prefix_cache_tokens_total", by="source"), "{{source}}"),),
        stacked=True,
    ),
    Panel(
        "Prefix hit ratio",
        "Share of prompt tokens found cached.",
        "percentunit",
        (Query(HIT_RATIO, "all servers"),),
        top=1,
    ),
    Panel(
        "Registry state",
        "Servers by how publishing goes. Degraded: they serve as before, and the router does not know them.",
        "short",
        (Query(total("quire_registry_state", by="state"), "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Registry lag",
        "Age of the oldest change that no publication has carried yet, and how long a publication takes.",
        "s",
        (
            Query(f"max (quire_registry_lag_seconds{{{HERE}}})", "oldest change"),
            Query(quantiles("quire_registry_publish_seconds", 99)[0].expr, "publication p99"),
        ),
    ),
    Panel(
        "Registry blocks",
        "That the registry knows of, beside those in both tiers that could be full; a block may be in both.",
        "short",
        (
            Query(total("quire_registry_blocks"), "published"),
            Query(total("quire_kv_blocks", 'state=~"active|cached"'), "active or cached"),
        ),
    ),
    Panel(
        "Registry drops",
        "Changes that found the buffer full, after which all blocks are published anew.",
        "suffix: /s",
        (Query(rate("quire_registry_dropped_total"), "dropped"),),
    ),
)

ROUTER = (
    Panel(
        "Replicas",
        "As the router sees them.",
        "short",
        (Query(f"max by (state) (quire_route_replicas{{{HERE}}})", "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Predicted against actual hits",
        "Of the prompt tokens that were looked up in the registry: how many should be cached, and were.",
        "percentunit",
        (
            Query(
                f"{rate('quire_route_cached_tokens_total', by='source')}"
                f" / on () group_left () {rate('quire_route_prompt_tokens_total')}",
                "{{source}}",
            ),
        ),
        top=1,
    ),
    Panel(
        "Placements",
        "Prefix: most of it is cached there. Load: it is cached nowhere. Moved: where it was, it is evicted.",
        "suffix: /s",
        (Query(rate("quire_route_requests_total", by="reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Retries and failures",
        "Second attempts, before the first byte; requests that failed, before it or after.",
        "suffix: /s",
        (
            Query(rate("quire_route_retries_total"), "retries"),
            Query(rate("quire_route_failures_total", by="when"), "failed {{when}}"),
        ),
    ),
    Panel(
        "Registry lookups",
        "Time to ask it. A router that gets no answer goes by load, and by what it has sent where.",
        "s",
        quantiles("quire_route_lookup_seconds", 50, 99),
    ),
    Panel(
        "Registry, seen by routers",
        "Routers by whether the registry answers.",
        "short",
        (Query(total("quire_route_registry_state", by="state"), "{{state}}"),),
        stacked=True,
    ),
)

LATENCY = (
    Panel("Time to first token", "From arrival.", "s", quantiles(TTFT, 50, 95, 99)),
    Panel(
        "Inter-token latency",
        "Between the tokens of a stream.",
        "s",
        quantiles("vllm:inter_token_latency_seconds", 50, 95, 99),
    ),
    Panel(
        "Queue time",
        "Arrival to first scheduling.",
        "s",
        quantiles("vllm:request_queue_time_seconds", 50, 95, 99),
    ),
    Panel(
        "Request latency", "Arrival to end.", "s", quantiles("vllm:e2e_request_latency_seconds", 50, 95, 99)
    ),
)

THROUGHPUT = (
    Panel(
        "Tokens",
        "Prompt tokens include cached ones.",
        "suffix: tok/s",
        (
            Query(rate("vllm:prompt_tokens_total"), "prompt"),
            Query(rate("vllm:generation_tokens_total"), "generated"),
        ),
    ),
    Panel(
        "Requests",
        "In the engine, by state.",
        "short",
        (Query(total("quire_requests", by="state"), "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Requests ended",
        "By how.",
        "suffix: /s",
        (Query(rate("vllm:request_success_total", by="finished_reason"), "{{finished_reason}}"),),
        stacked=True,
    ),
    Panel(
        "Step time",
        "Mean of a step's phases. Waiting is for the device: what the host does meanwhile costs nothing.",
        "s",
        (Query(mean("quire_step_seconds", "phase"), "{{phase}}"),),
        stacked=True,
    ),
    Panel(
        "Tokens a step",
        "Mean, by kind.",
        "short",
        (Query(mean("quire_step_tokens", "kind"), "{{kind}}"),),
        stacked=True,
    ),
)

ROWS: dict[str, tuple[Panel, ...]] = {
    "Overview": OVERVIEW,
    "KV cache": KV_CACHE,
    "Prefix cache and registry": PREFIXES,
    "Router": ROUTER,
    "Latency": LATENCY,
    "Throughput": THROUGHPUT,
}
