"""A server's own KV cache counters (Prometheus), before and after a run."""

from __future__ import annotations

import urllib.request

import httptools

from quire.loadtest.client.http_client import HttpClient

# vLLM's and Quire's; other servers' metrics with these words in their names are kept as well.
WORDS = ("kv_", "cache", "preempt", "num_requests")


def parse_counters(text: str) -> dict[str, float]:
    """Return counters and gauges that tell of the KV cache, `name{label="value"}` to value.

    Raises ValueError for text of another form.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        if family.type not in ("counter", "gauge") or not any(word in family.name for word in WORDS):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(
                f'{key}="{value}"' for key, value in sorted(sample.labels.items()) if key != "model_name"
            )
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def read_counters(client: HttpClient) -> dict[str, float]:
    """Return a server's counters; none where it has none that we could read."""
    try:
        status, body = await client.get("/metrics")
        return parse_counters(body.decode(errors="replace")) if status == 200 else {}
    except (OSError, httptools.HttpParserError, ValueError):  # ValueError: a page, whatever the path is
        return {}


def read_samples(url: str) -> dict[str, float]:
    """Return every sample of a server's /metrics, by its name with its labels as they stand there."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = [line.rpartition(" ") for line in str(answer.read(), "utf-8").splitlines()]
    return {name: float(value) for name, _, value in lines if not name.startswith("#")}
