"""What several runs of a served workload come to."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadtest.served import ServedResult, median

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
