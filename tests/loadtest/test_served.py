"""What several runs of a served workload come to."""

from __future__ import annotations

from dataclasses import asdict, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.loadtest import served
from quire.loadtest.client.records import Record
from quire.loadtest.client.sessions import Session
from quire.loadtest.client.target import Target
from quire.loadtest.served import Case, ServedResult, measure, median

FIRST = ServedResult(
    engine="quire", model="m", workload="w", mode="served", concurrency=256, rate=0.0, out_tok_s=0.0,
    in_tok_s=0.0, req_s=0.0, ttft_p50_ms=0.0, ttft_p99_ms=0.0, itl_p50_ms=0.0, itl_p99_ms=0.0,
    normalized_latency_ms=0.0, runs=1, device="d", commit="c", date="2026-11-23", command="served",
)  # fmt: skip
MEASURED = [name for name, value in asdict(FIRST).items() if isinstance(value, float)]


@given(st.lists(st.lists(st.floats(0, 1e5), min_size=len(MEASURED), max_size=len(MEASURED)), min_size=1))
def test_each_number_is_the_median_of_all_runs(runs: list[list[float]]) -> None:
    results = [replace(FIRST, **dict(zip(MEASURED, run, strict=True))) for run in runs]
    medians = dict(zip(MEASURED, np.median(runs, axis=0).tolist(), strict=True))
    assert asdict(median(results)) == {**asdict(FIRST), **medians, "runs": len(runs)}


def test_what_is_served_is_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """So were all figures that stand in served.jsonl, those of `mixed` too, which is sampled elsewhere."""
    sent: list[dict[str, object]] = []

    def answer(target: Target, sessions: list[Session], **options: object) -> list[Record]:
        sent.extend(msgspec.json.decode(target.body(session.turns[0], [])) for session in sessions)
        return [Record(session=0, turn=0, due=0.0, sent=0.0, first=1.0, last=2.0, output_tokens=2)]

    monkeypatch.setattr(served, "run_sessions", answer)
    measure("http://h", "m", Case("mixed", concurrency=256), "cpu", "a")
    assert len(sent) == 256
    assert all(body["temperature"] == 0 and "seed" not in body for body in sent)
    assert all("return_token_ids" not in body for body in sent)
