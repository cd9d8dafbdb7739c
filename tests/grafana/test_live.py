"""A real Prometheus scrapes a real server under load: every metric is there, every panel finds data."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from grafana.draw import draw
from grafana.scene import RULES, SMALL, Load, Prometheus, expression, fetch, prometheus, quire, redis
from tests.helm.chart import CHART, VALUES, find, render

BOARD = json.loads((Path(__file__).parents[2] / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
REPLICA = {"namespace": "llms", "pod": "quire-7d4b9c6f5-x2x4z"}  # what a cluster's Prometheus would add
SECONDS = 90  # within which what must come has come

# name -> (type, labels with their values; None: any)
METRICS: dict[str, tuple[str, dict[str, set[str] | None]]] = {
    "quire_kv_blocks": ("gauge", {"tier": {"device", "host"}, "state": {"free", "active", "cached"}}),
    "quire_kv_capacity_blocks": ("gauge", {"tier": {"device", "host"}}),
    "quire_kv_block_references": ("gauge", {}),
    "quire_kv_tokens_filled": ("gauge", {}),
    "quire_kv_fragmentation_ratio": ("gauge", {}),
    "quire_kv_behind_window_blocks": ("gauge", {}),
    "quire_rank_memory_bytes": ("gauge", {"rank": {"0"}}),
    "quire_all_reduce_seconds": ("gauge", {}),
    "quire_kv_copy_on_write": ("counter", {}),
    "quire_kv_block_allocations": ("counter", {}),
    "quire_kv_block_evictions": ("counter", {}),
    "quire_kv_swap_blocks": ("counter", {"direction": {"in", "out"}}),
    "quire_kv_swap_bytes": ("counter", {"direction": {"in", "out"}}),
    "quire_preemptions": ("counter", {"mode": {"swap", "recompute"}}),
    "quire_prefix_cache_tokens": ("counter", {"source": {"device", "host", "miss"}}),
    "quire_requests": ("gauge", {"state": {"running", "waiting", "swapped"}}),
    "quire_http_requests": ("counter", {"endpoint": None, "status": None}),
    "quire_requests_in_memory": ("gauge", {}),
    "quire_event_loop_tasks": ("gauge", {}),
    "quire_event_loop_lag_seconds": ("histogram", {}),
    "quire_step_seconds": ("histogram", {"phase": {"schedule", "launch", "wait", "commit"}}),
    "quire_step_tokens": ("histogram", {"kind": {"prefill", "decode"}}),
    "quire_registry_state": ("gauge", {"state": {"ok", "degraded", "off"}}),
    "quire_registry_publish_seconds": ("histogram", {}),
    "quire_registry_dropped": ("counter", {}),
    "quire_registry_lag_seconds": ("gauge", {}),
    "quire_registry_blocks": ("gauge", {}),
    "quire_response_store_state": ("gauge", {"state": {"memory", "redis", "degraded"}}),
    "quire_response_store_failures": ("counter", {}),
    "quire_responses_not_written": ("counter", {}),
    "vllm:num_requests_running": ("gauge", {"model_name": None}),
    "vllm:num_requests_waiting": ("gauge", {"model_name": None}),
    "vllm:num_requests_swapped": ("gauge", {"model_name": None}),
    "vllm:kv_cache_usage_perc": ("gauge", {"model_name": None}),
    "vllm:gpu_cache_usage_perc": ("gauge", {"model_name": None}),
    "vllm:cpu_cache_usage_perc": ("gauge", {"model_name": None}),
    "vllm:num_preemptions": ("counter", {"model_name": None}),
    "vllm:prompt_tokens": ("counter", {"model_name": None}),
    "vllm:generation_tokens": ("counter", {"model_name": None}),
    "vllm:prefix_cache_queries": ("counter", {"model_name": None}),
    "vllm:prefix_cache_hits": ("counter", {"model_name": None}),
    "vllm:request_success": (
        "counter",
        {"model_name": None, "finished_reason": {"stop", "length", "abort", "error"}},
    ),
    "vllm:time_to_first_token_seconds": ("histogram", {"model_name": None}),
    "vllm:inter_token_latency_seconds": ("histogram", {"model_name": None}),
    "vllm:e2e_request_latency_seconds": ("histogram", {"model_name": None}),
    "vllm:request_queue_time_seconds": ("histogram", {"model_name": None}),
    "vllm:cache_config_info": (
        "gauge",
        {
            "model_name": None,
            "block_size": {"16"},
            "num_gpu_blocks": {"64"},
            "num_cpu_blocks": None,
            "cache_dtype": {"float32"},
        },
    ),
    "vllm:lora_requests_info": (
        "gauge",
        {
            "model_name": None,
            "max_lora": {"0"},
            "running_lora_adapters": {""},
            "waiting_lora_adapters": {""},
        },
    ),
}
ROUTER_METRICS: dict[str, tuple[str, dict[str, set[str] | None]]] = {
    "quire_route_requests": ("counter", {"reason": None}),
    "quire_route_retries": ("counter", {}),
    "quire_route_failures": ("counter", {"when": {"before", "during"}}),
    "quire_route_prompt_tokens": ("counter", {}),
    "quire_route_cached_tokens": ("counter", {"source": {"predicted", "actual"}}),
    "quire_route_lookup_seconds": ("histogram", {}),
    "quire_route_replicas": ("gauge", {"state": {"ready", "draining", "down"}}),
    "quire_route_in_flight": ("gauge", {}),
    "quire_route_registry_state": ("gauge", {"state": {"ok", "degraded", "off"}}),
    "quire_event_loop_tasks": ("gauge", {}),
    "quire_event_loop_lag_seconds": ("histogram", {}),
}


@dataclass(frozen=True)
class Scene:
    server: str
    router: str
    prometheus: Prometheus


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        redis() as registry,
        quire("serve", *SMALL, "--redis-url", f"redis://{registry}/0") as server,
        quire("route", "--redis-url", f"redis://{registry}/0") as router,
        prometheus(folder, {"quire": [server], "quire-router": [router]}, "500ms", REPLICA) as scraper,
    ):
        yield Scene(server, router, scraper)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


Families = dict[str, tuple[str, list[tuple[dict[str, str], float]]]]


def scrape(server: str) -> Families:
    """Name -> type, and its samples but for a histogram's buckets and the times of creation."""
    families = text_string_to_metric_families(fetch(f"{server}/metrics").decode())
    return {
        family.name: (
            family.type,
            [
                (sample.labels, sample.value)
                for sample in family.samples
                if not sample.name.endswith(("_created", "_bucket", "_sum"))
            ],
        )
        for family in families
    }


def value(families: Families, name: str, **labels: str) -> float:
    return sum(number for found, number in families[name][1] if labels.items() <= found.items())


def check(families: Families, listed: dict[str, tuple[str, dict[str, set[str] | None]]]) -> None:
    """All that is listed is there, of this type and with just these labels."""
    assert set(families) >= set(listed)
    for name, (kind, labels) in listed.items():
        found, samples = families[name]
        assert found == kind, name
        seen: dict[str, set[str]] = {}
        for labelled, number in samples:
            assert number >= 0, name
            for label, text in labelled.items():
                seen.setdefault(label, set()).add(text)
        assert set(seen) == set(labels), name
        for label, texts in labels.items():
            assert texts is None or seen[label] == texts, (name, label)


def test_every_metric_is_there_and_the_sums_are_right(scene: Scene) -> None:
    counters = {name for name, (kind, _) in METRICS.items() if kind == "counter"}
    # which move when Redis is away
    counters -= {"quire_registry_dropped", "quire_response_store_failures", "quire_responses_not_written"}

    def have_moved() -> bool:
        families = scrape(scene.server)
        for tier in ("device", "host"):  # a block in transfer is in no state
            capacity = value(families, "quire_kv_capacity_blocks", tier=tier)
            assert value(families, "quire_kv_blocks", tier=tier) <= capacity
        return all(value(families, name) > 0 for name in counters)

    with Load(scene.router, clients=8):
        until(have_moved, "a counter has not moved")
        families, routed = scrape(scene.server), scrape(scene.router)
    check(families, METRICS)
    check(routed, ROUTER_METRICS)
    assert value(families, "quire_prefix_cache_tokens") == value(families, "vllm:prompt_tokens")
    assert value(families, "quire_preemptions") == value(families, "vllm:num_preemptions")
    assert value(families, "quire_registry_state") == 1
    assert value(families, "quire_registry_state", state="ok") == 1
    until(lambda: value(scrape(scene.server), "quire_requests") == 0, "a request is left")
    families = scrape(scene.server)
    assert value(families, "quire_kv_blocks", state="active") == 0
    assert value(families, "quire_kv_block_references") == 0
    for tier in ("device", "host"):
        capacity = value(families, "quire_kv_capacity_blocks", tier=tier)
        assert value(families, "quire_kv_blocks", tier=tier) == capacity > 0


def panels() -> Iterator[tuple[str, str]]:
    """(title, expression) of every query of the dashboard, as Grafana would send it."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            expr = expression(target["expr"])
            assert "$" not in expr, expr
            yield panel["title"], expr


def scalers() -> Iterator[tuple[str, str]]:
    """(name, expression) of what KEDA asks, and of what an adapter serves to the HPA."""
    for trigger in find(render(*VALUES["everything"]), "ScaledObject")["spec"]["triggers"]:
        yield f"KEDA {trigger['name']}", trigger["metadata"]["query"]
    adapter = yaml.safe_load((CHART / "files" / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
    for rule in adapter["rules"]:
        asked = rule["metricsQuery"].replace("<<.GroupBy>>", "pod")
        yield rule["name"]["as"], asked.replace("<<.LabelMatchers>>", 'namespace="llms", pod=~"quire-.+"')
        yield f"{rule['name']['as']}, found", rule["seriesQuery"]


def recorded() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                yield "recorded", rule["record"]


def test_every_panel_rule_and_scaler_finds_data(scene: Scene, tmp_path: Path) -> None:
    start = time.time()
    missing = dict.fromkeys([*panels(), *scalers(), *recorded()])
    assert len(missing) > 40

    def all_found() -> bool:
        for title, expr in list(missing):
            samples = scene.prometheus.query(expr)
            if samples and not any(math.isnan(number) for _, number in samples):
                del missing[title, expr]
        return not missing

    with Load(scene.router, clients=8):
        until(all_found, str(missing))
    picture = tmp_path / "dashboard.png"
    draw(scene.prometheus, start, time.time(), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    groups = json.loads(fetch(f"{scene.prometheus.url}/api/v1/rules"))["data"]["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["health"] == "ok", rule
