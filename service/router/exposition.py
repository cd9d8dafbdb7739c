"""The router's metrics in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire.service.metrics.families import counter, encode, gauge, histogram, loop_families
from quire.service.router.state import RouterState


def exposition(state: RouterState, accept: str = "") -> tuple[bytes, str]:
    return encode(_Families(state), accept)


class _Families(Collector):
    def __init__(self, state: RouterState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        metrics = self._state.metrics
        reasons = [({"reason": reason}, count) for reason, count in metrics.requests.items()]
        yield counter("quire_route_requests", "Requests by why they went where they went", *reasons)
        yield counter("quire_route_retries", "Attempts with another replica", ({}, metrics.retries))
        failures = [({"when": when}, count) for when, count in metrics.failures.items()]
        yield counter("quire_route_failures", "Requests that failed, before or during the answer", *failures)
        yield counter(
            "quire_route_prompt_tokens",
            "Prompt tokens of requests that a prediction was made for and came back with the truth",
            ({}, metrics.prompt_tokens),
        )
        yield counter(
            "quire_route_cached_tokens",
            "Of these, how many were predicted to be cached where they went, and how many were",
            ({"source": "predicted"}, metrics.predicted_tokens),
            ({"source": "actual"}, metrics.actual_tokens),
        )
        yield histogram("quire_route_lookup_seconds", "Time to ask the registry", ({}, metrics.lookup))
        yield from self._fleet_families()
        yield from loop_families(self._state.loop_watch)

    def _fleet_families(self) -> Iterator[Metric]:
        state = self._state
        states = Counter(replica.condition for replica in state.replicas)
        by_state = [({"state": name}, states[name]) for name in ("ready", "draining", "down")]
        yield gauge("quire_route_replicas", "Replicas by state", *by_state)
        in_flight = sum(replica.in_flight for replica in state.replicas)
        yield gauge("quire_route_in_flight", "Requests that replicas are working on", ({}, in_flight))
        registry = "off" if state.watch is None else state.watch.state
        by_registry = [({"state": name}, float(name == registry)) for name in ("ok", "degraded", "off")]
        yield gauge("quire_route_registry_state", "Whether the registry answers", *by_registry)
