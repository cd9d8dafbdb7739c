"""The cluster demo: faults of Redis are what they say and end, and what is measured is all requests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from quire.loadtest.client.records import Record
from quire.loadtest.cluster_demo.outcome import compare_to_well, outcome_of
from quire.loadtest.cluster_demo.redis_faults import FAULTS, ProxiedRedis
from quire.loadtest.servers.fault_proxy import FaultProxy
from quire.loadtest.servers.redis_server import RedisServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedRedis]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    proxy = FaultProxy(server.port)
    yield ProxiedRedis(server, proxy)
    proxy.close()
    server.kill()


def is_well(proxied: ProxiedRedis, timeout: float) -> bool:
    """Whether a new connection gets the right answer."""
    client = redis.Redis.from_url(
        proxied.proxy.url, socket_timeout=timeout, retry=Retry(NoBackoff(), 0), protocol=2
    )
    try:
        return client.get("key") == b"value"
    except (redis.RedisError, OSError, ValueError):
        return False
    finally:
        client.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_felt_and_ends(proxied: ProxiedRedis, name: str) -> None:
    proxied.server.client.set("key", "value")
    assert is_well(proxied, timeout=30)
    over = Event()
    with FAULTS[name](proxied, over):
        until(lambda: not is_well(proxied, timeout=0.05))
    assert over.is_set()
    proxied.server.client.set("key", "value")
    assert is_well(proxied, timeout=30)


def records(ttfts: list[float], cached: list[int]) -> list[Record]:
    good = [
        Record(session=at, turn=0, due=float(at), sent=float(at), first=at + ttft, cached_tokens=tokens)
        for at, (ttft, tokens) in enumerate(zip(ttfts, cached, strict=True))
    ]
    return [*good, Record(session=99, turn=0, due=0.0, sent=0.0, failure="HTTP 500", detail="why")]


def test_outcomes_are_of_what_was_answered() -> None:
    outcome = outcome_of(records([0.1, 0.2, 0.3, 0.4], [0, 94, 95, 100]), prefix_tokens=100)
    assert (outcome.requests, outcome.failed, outcome.hits) == (5, 1, 0.5)
    assert outcome.ttft_p50 == pytest.approx(250)
    with pytest.raises(ValueError, match="HTTP 500 why"):
        outcome_of(records([], []), prefix_tokens=100)


def test_a_fault_is_compared_with_the_turns_between() -> None:
    """A turn that was disturbed as a whole widens the interval, and is not taken for the fault's doing."""
    rng = np.random.default_rng(1)
    well, during = rng.exponential(0.1, (20, 12)), rng.exponential(0.1, (20, 12)) + 0.05

    def turns(times: np.ndarray) -> list[list[Record]]:
        return [records(turn, [100] * len(turn)) for turn in times.tolist()]

    found = compare_to_well(turns(well), turns(during), 100, lookup_seconds=2.6, recoveries=[1.0])
    assert found.outcome.requests == 20 * 13 and found.outcome.failed == 20
    assert found.lookup_mean == pytest.approx(10)
    assert found.p50_later.difference == pytest.approx(1e3 * (np.median(during) - np.median(well)))
    assert 0 < found.p50_later.low < 50 < found.p50_later.high
    disturbed = well.copy()
    disturbed[7] += 5
    p99 = compare_to_well(turns(well), turns(disturbed), 100, 0.0, [1.0]).p99_later
    assert p99.difference > 3000 and p99.low < 100


def test_the_demo_counts_every_request(tmp_path: Path) -> None:
    """With a cluster of real processes, in miniature."""
    file = tmp_path / "cluster.json"
    options = ["--tenants", "3", "--prefix-tokens", "64", "--rounds", "1", "--faults", "killed", "flushed"]
    command = [sys.executable, "-m", "quire.loadtest.cluster_demo", *options, "--json", str(file)]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=240).stdout
    result = json.loads(file.read_bytes())
    assert result["command"].startswith("python -m quire.loadtest.cluster_demo --tenants 3")
    assert result["device"].endswith("CPU cores") and result["commit"] and result["date"]
    assert result["round_robin"]["requests"] == 24
    assert result["router"]["requests"] == 48
    assert set(result["faults"]) == {"killed", "flushed"}
    for name, fault in result["faults"].items():
        assert (fault["outcome"]["requests"], fault["outcome"]["failed"]) == (24, 0)
        assert len(fault["recovery_seconds"]) == 1
        assert name in shown
