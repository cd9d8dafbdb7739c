"""What the dashboard shows: panels as plain data, each with the queries that feed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grafana.queries import HERE, Query, mean, of_requests, quantiles, rate, total


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


IN_USE = total("quire_kv_blocks", 'tier="device", state="active"')
CAPACITY = total("quire_kv_capacity_blocks", 'tier="device"')
IN_USE_BY_TIER = total("quire_kv_blocks", 'state="active"', "tier")
CAPACITY_BY_TIER = total("quire_kv_capacity_blocks", by="tier")
REFERENCES_BY_SERVER = total("quire_kv_block_references", by="instance")
IN_USE_BY_SERVER = total("quire_kv_blocks", 'tier="device", state="active"', "instance")
HIT_RATIO = f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}"
TTFT = "vllm:time_to_first_token_seconds"


def _stat(title: str, description: str, unit: str, expr: str) -> Panel:
    return Panel(title, description, unit, (Query(expr),), "stat")


def _stacked(title: str, description: str, unit: str, query: Query) -> Panel:
    return Panel(title, description, unit, (query,), stacked=True)


OVERVIEW = (
    _stat(
        "KV occupancy",
        "Requests hold this share of the device's KV blocks. When it stays above 95 % while requests wait, "
        "add replicas or lower --max-num-seqs.",
        "percentunit",
        f"{IN_USE} / {CAPACITY}",
    ),
    _stat(
        "Running",
        "So many requests are computed together. When others wait though blocks are free, raise "
        "--max-num-seqs, of which a request takes one for each of its answers.",
        "short",
        total("quire_requests", 'state="running"'),
    ),
    _stat(
        "Waiting",
        "So many requests have not started. When there are more and more, look at KV occupancy: if that is "
        "near 100 %, add replicas; if not, raise --max-num-seqs.",
        "short",
        total("quire_requests", 'state="waiting"'),
    ),
    _stat(
        "Generated",
        "The servers generate so many tokens a second. When it falls while requests run, look at Step time.",
        "suffix: tok/s",
        rate("vllm:generation_tokens_total"),
    ),
    _stat(
        "TTFT p95",
        "95 of 100 requests have their first token within this time. When it grows, look at Queue time: what "
        "is not queueing is the prefill of long prompts.",
        "s",
        quantiles(TTFT, 95)[0].expr,
    ),
    _stat(
        "Prefix hits",
        "This share of prompt tokens is cached and costs no prefill. When it falls, see that prompts begin "
        "with the same text and that a router sends them where it is cached.",
        "percentunit",
        HIT_RATIO,
    ),
)

LATENCY = (
    Panel(
        "Time to first token",
        "Clients wait so long for an answer to begin. When it grows with Queue time, add replicas; when it "
        "grows alone, prompts are longer or fewer of them are cached: look at Prefix hit ratio.",
        "s",
        of_requests(TTFT),
    ),
    Panel(
        "Inter-token latency",
        "Clients wait so long between two tokens of a stream. When it grows, lower --max-num-seqs, or "
        "--max-num-batched-tokens if only p99 does: long prompts then hold up the others less.",
        "s",
        of_requests("vllm:inter_token_latency_seconds"),
    ),
    Panel(
        "Request latency",
        "Requests take so long from arrival to end. When it grows and the other three panels do not, clients "
        "ask for longer answers.",
        "s",
        of_requests("vllm:e2e_request_latency_seconds"),
    ),
    Panel(
        "Queue time",
        "Requests wait so long for their first step. When it grows, add replicas; until these are there, a "
        "smaller --max-num-queued-reqs refuses early what would wait too long.",
        "s",
        of_requests("vllm:request_queue_time_seconds"),
    ),
)

KV_CACHE = (
    _stacked(
        "Device blocks",
        "Active blocks are in some block table, cached ones are found again by content, and those in "
        "transfer are not shown. When neither free nor cached ones are left, requests are preempted: add "
        "replicas, or lower --max-num-seqs.",
        "short",
        Query(total("quire_kv_blocks", 'tier="device"', "state"), "{{state}}"),
    ),
    _stacked(
        "Host blocks",
        "Active blocks are those of swapped requests, cached ones were spilled from the device. When none is "
        "free, raise --swap-space if the host has memory.",
        "short",
        Query(total("quire_kv_blocks", 'tier="host"', "state"), "{{state}}"),
    ),
    Panel(
        "Occupancy",
        "Requests hold this share of a tier's blocks. When it is near 100 % while requests wait, memory is "
        "the limit: --kv-cache-dtype fp8_e4m3 makes room, and so do more replicas.",
        "percentunit",
        (Query(f"{IN_USE_BY_TIER} / ({CAPACITY_BY_TIER} > 0)", "{{tier}}"),),
        top=1,
    ),
    Panel(
        "Internal fragmentation",
        "This share of the slots in active blocks holds no token, less than one block a sequence. When it is "
        "more than a tenth, sequences are short: a smaller --block-size wastes less.",
        "percentunit",
        (Query(f"quire_kv_fragmentation_ratio{{{HERE}}}", "{{instance}}"),),
    ),
    Panel(
        "Sharing",
        "So many block tables name an active block on average. When it is 1 though prompts begin alike, "
        "nothing is shared: look for a date or a name at their beginning, or a cache_salt.",
        "suffix:×",
        (Query(f"{REFERENCES_BY_SERVER} / ({IN_USE_BY_SERVER} > 0)", "{{instance}}"),),
    ),
    Panel(
        "Block turnover",
        "Blocks are handed out, cached ones given up for that, and shared ones copied before a write. When "
        "evictions keep up with allocations, prefixes do not stay: add replicas, or pin the most used with "
        "--pin-prefix.",
        "suffix: /s",
        (
            Query(rate("quire_kv_block_allocations_total"), "allocated"),
            Query(rate("quire_kv_block_evictions_total"), "evicted"),
            Query(rate("quire_kv_copy_on_write_total"), "copied on write"),
        ),
    ),
    Panel(
        "Swap",
        "Blocks move between device and host; those that go out include spilled cached ones. When both "
        "directions stay busy, the same blocks go to and fro: lower --max-num-seqs.",
        "Bps",
        (Query(rate("quire_kv_swap_bytes_total", by="direction"), "{{direction}}"),),
    ),
    Panel(
        "Preemptions",
        "Requests give up their blocks for older ones, and continue later. A few are fine; when there are "
        "more than requests that end, lower --max-num-seqs or add replicas.",
        "suffix: /s",
        (Query(rate("quire_preemptions_total", by="mode"), "{{mode}}"),),
    ),
)

PREFIXES = (
    _stacked(
        "Prompt tokens by source",
        "Prompt tokens are found on the device, found in host memory, or computed (miss). When misses grow "
        "with the same clients, look at Block turnover for evictions.",
        "suffix: tok/s",
        Query(rate("quire_prefix_cache_tokens_total", by="source"), "{{source}}"),
    ),
    Panel(
        "Prefix hit ratio",
        "This share of prompt tokens is found cached. When it falls, prompts begin differently than before, "
        "blocks are evicted, or the router has lost its registry: look at the panels beside.",
        "percentunit",
        (Query(HIT_RATIO, "all servers"),),
        top=1,
    ),
    _stacked(
        "Registry state",
        "Servers publish what they hold (ok), cannot (degraded), or need not (off). Degraded ones serve as "
        "before, but the router sends them requests by load only: look at Redis, its memory, ACL and "
        "network.",
        "short",
        Query(total("quire_registry_state", by="state"), "{{state}}"),
    ),
    Panel(
        "Registry lag",
        "The oldest change waits so long to be published, and a publication takes so long. When it is more "
        "than a second, look at Redis' latency: the router sends requests to prefixes that are gone.",
        "s",
        (
            Query(f"max (quire_registry_lag_seconds{{{HERE}}})", "oldest change"),
            Query(quantiles("quire_registry_publish_seconds", 99)[0].expr, "publication p99"),
        ),
    ),
    Panel(
        "Registry blocks",
        "The registry knows of so many blocks, and so many in both tiers could be full; a block may be in "
        "both tiers. When the first falls to zero, Redis was emptied: it fills by itself within a heartbeat, "
        "or see Registry state.",
        "short",
        (
            Query(total("quire_registry_blocks"), "published"),
            Query(total("quire_kv_blocks", 'state=~"active|cached"'), "active or cached"),
        ),
    ),
    Panel(
        "Registry drops",
        "Changes found the buffer full, and all blocks are then published anew. It is zero while Redis "
        "answers: when it is not, look at Registry lag and at Redis.",
        "suffix: /s",
        (Query(rate("quire_registry_dropped_total"), "dropped"),),
    ),
)

ROUTER = (
    _stacked(
        "Replicas",
        "The router sees so many replicas as ready, draining and down. When one stays down, look at its log "
        "and whether the router reaches its port.",
        "short",
        Query(f"max by (state) (quire_route_replicas{{{HERE}}})", "{{state}}"),
    ),
    Panel(
        "Predicted against actual hits",
        "This share of the prompt tokens that were looked up should be cached, and this share was. When the "
        "actual one is far below, replicas evict faster than they publish: look at Registry lag, and add "
        "replicas.",
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
    _stacked(
        "Placements",
        "Requests go where most of their prompt is cached (prefix), to the least loaded replica (load, or "
        "silent without an answer of the registry), away from one that evicted their prompt (moved), or back "
        "to their stream. When silent prevails, look at Registry lookups.",
        "suffix: /s",
        Query(rate("quire_route_requests_total", by="reason"), "{{reason}}"),
    ),
    Panel(
        "Retries and failures",
        "The router tries a request again before the first byte, and some fail, before it or after. When it "
        "is not zero, a replica refuses or breaks: find it in Replicas and in the router's log.",
        "suffix: /s",
        (
            Query(rate("quire_route_retries_total"), "retries"),
            Query(rate("quire_route_failures_total", by="when"), "failed {{when}}"),
        ),
    ),
    Panel(
        "Registry lookups",
        "The router asks the registry for so long. Without an answer it goes by load and by what it has sent "
        "where: when it is above 5 ms, put Redis nearer to the routers.",
        "s",
        quantiles("quire_route_lookup_seconds", 50, 99),
    ),
    _stacked(
        "Registry, seen by routers",
        "The registry answers these routers (ok), does not (degraded), or is not used (off). When one is "
        "degraded, look at Redis and at the router's network policy.",
        "short",
        Query(total("quire_route_registry_state", by="state"), "{{state}}"),
    ),
)

THROUGHPUT = (
    Panel(
        "Tokens",
        "The servers take in prompt tokens, cached ones among them, and generate others. When generation "
        "falls while prompts grow, prefill takes the steps: lower --max-num-batched-tokens.",
        "suffix: tok/s",
        (
            Query(rate("vllm:prompt_tokens_total"), "prompt"),
            Query(rate("vllm:generation_tokens_total"), "generated"),
        ),
    ),
    _stacked(
        "Requests",
        "Requests run, wait, or are swapped to host memory. When swapped ones stay, there are too many at "
        "once: lower --max-num-seqs.",
        "short",
        Query(total("quire_requests", by="state"), "{{state}}"),
    ),
    _stacked(
        "Requests ended",
        "Requests end by a stop, at their length limit, by the client's leaving (abort), or by an error. "
        "When there are errors, look for them in the server's log; when aborts grow, clients give up: look "
        "at Time to first token.",
        "suffix: /s",
        Query(rate("vllm:request_success_total", by="finished_reason"), "{{finished_reason}}"),
    ),
    _stacked(
        "Step time",
        "A step's phases take so long on average. Waiting is for the device, and what the host does "
        "meanwhile costs nothing: when the other phases together are longer than it, give the server more or "
        "faster CPU cores.",
        "s",
        Query(mean("quire_step_seconds", "phase"), "{{phase}}"),
    ),
    _stacked(
        "Tokens a step",
        "A step computes so many tokens on average. When decode tokens are few while requests wait, look at "
        "KV occupancy: memory keeps the batch small.",
        "short",
        Query(mean("quire_step_tokens", "kind"), "{{kind}}"),
    ),
)

RANKS = (
    _stacked(
        "Memory of ranks",
        "Each rank of a server had taken so much memory of its device when it had started. When one has "
        "taken much more than the others, look for another program on its GPU.",
        "bytes",
        Query(total("quire_rank_memory_bytes", by="instance, rank"), "{{instance}} rank {{rank}}"),
    ),
    Panel(
        "Sum over ranks",
        "A sum of one token's hidden states over the ranks took so long at start; 0 with one rank. A layer "
        "has two. When it takes more than 10 µs, look at how the GPUs are joined: nvidia-smi topo -m.",
        "s",
        (Query(total("quire_all_reduce_seconds", by="instance"), "{{instance}}"),),
    ),
)

ROWS: dict[str, tuple[Panel, ...]] = {
    "Overview": OVERVIEW,
    "Latency": LATENCY,
    "KV cache": KV_CACHE,
    "Prefix cache and registry": PREFIXES,
    "Router": ROUTER,
    "Throughput": THROUGHPUT,
    "Ranks": RANKS,
}
