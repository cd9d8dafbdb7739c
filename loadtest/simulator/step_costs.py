"""Reckon how long a step takes: linear in what its plan asks for, by a roofline or fitted to steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.schedule.plan import StepPlan
from quire.loadtest.simulator.geometry import ONE_RANK, Device, Model, Ranks

FEATURES = ("step", "prefill_tokens", "decode_rows", "context_tokens", "prefill_pairs", "copies", "swaps")
"""One for the step itself; tokens prefilled; rows that decode; tokens whose keys and values those rows read;
(query, key) pairs of prefills; blocks copied; blocks swapped either way."""

REWEIGHINGS = 6
MOST_SWEEPS = 20_000  # of the fit; it mostly ends long before

Features = NDArray[np.float64]


class StepRecord(msgspec.Struct, frozen=True):
    """One measured step: its features, in the order of FEATURES, and its seconds. A line of a record file."""

    features: list[float]
    seconds: float


class StepCosts(msgspec.Struct, frozen=True):
    """Seconds for one unit of each feature, in the order of FEATURES."""

    seconds: list[float]
    source: str  # where they come from, in words
    error: float | None = None  # mean |predicted − measured| ÷ measured, on steps that were not fitted
    total_error: float | None = None  # |predicted − measured| ÷ measured of the sum of those steps

    def describe(self) -> str:
        """Tell where they come from, and how wrong they are if that is known."""
        if self.error is None or self.total_error is None:
            return self.source
        return f"{self.source}: mean error of a step {self.error:.1%}, of the sum {self.total_error:.1%}"

    def of(self, plan: StepPlan) -> float:
        """Return the seconds of a step."""
        return float(step_features(plan) @ np.array(self.seconds))


def step_features(plan: StepPlan) -> Features:
    decodes = plan.num_decodes
    queries = plan.query_lens[decodes:].astype(np.float64)
    contexts = plan.context_lens[decodes:]
    pairs = (queries * (contexts - (queries - 1) / 2)).sum()
    return np.array(
        [
            1.0,
            len(plan.prefill_tokens),
            decodes,
            plan.context_lens[:decodes].sum(),
            pairs,
            len(plan.copies),
            len(plan.swap_out) + len(plan.swap_in),
        ],
        np.float64,
    )


def roofline(
    model: Model, device: Device, block_size: int, pieces: int = 1, ranks: Ranks = ONE_RANK
) -> StepCosts:
    """Reckon weights and context read once a step, products at a share of the peak, one after the other.

    `pieces`: separate copies that moving one block over the link takes: 1 where a block is one region across
    all layers, 2 × layers where each layer has its own. `ranks`: each device does its part of all of it, and
    two sums over them follow in every layer, of a hidden state for each token.
    """
    bandwidth = device.bandwidth * device.bandwidth_share * ranks.size
    flops = device.flops * device.flops_share * ranks.size
    block_bytes = block_size * model.kv_bytes_per_token
    sums = 2 * model.layers
    sum_start = ranks.seconds(0)
    sum_of_token = ranks.seconds(model.hidden * model.dtype_bytes) - sum_start
    per_token = 2 * model.weight_bytes / model.dtype_bytes / flops + sums * sum_of_token
    # A pair takes 2 × head_dim FLOPs for the score and as many for the value, in every head and layer.
    per_pair = 2 * model.kv_bytes_per_token / model.dtype_bytes / flops
    link = device.link_bandwidth * ranks.size
    return StepCosts(
        seconds=[
            model.weight_bytes / bandwidth + sums * sum_start,
            per_token,
            per_token,
            model.kv_bytes_per_token / bandwidth,
            per_pair,
            2 * block_bytes / bandwidth,
            pieces * device.transfer_seconds + block_bytes / link,
        ],
        source=(
            f"roofline of {model.name} on {'' if ranks.size == 1 else f'{ranks.size} × '}{device.name}: "
            f"{device.bandwidth_share:.0%} of its bandwidth, {device.flops_share:.0%} of its FLOP/s"
            + ("" if ranks.size == 1 else f", a sum over ranks {ranks.sum_seconds * 1e6:g} µs and more")
        ),
    )


def fit(records: Sequence[StepRecord], source: str) -> StepCosts:
    """Fit every other record by least squares of the error relative to what is predicted, no cost below 0.

    The error is that on the rest. Raise ValueError with fewer than four records.
    """
    if len(records) < 4:
        raise ValueError(f"a fit needs at least 4 steps, got {len(records)}")
    features = np.array([record.features for record in records])
    seconds = np.array([record.seconds for record in records])
    # Weighed by what was measured, a step that was quick by chance would count for more than a slow one.
    expected = np.full(len(seconds[::2]), seconds.mean())
    for _ in range(REWEIGHINGS):
        costs = _non_negative_least_squares(features[::2] / expected[:, None], seconds[::2] / expected)
        expected = np.maximum(features[::2] @ costs, seconds.min())
    predicted, measured = features[1::2] @ costs, seconds[1::2]
    return StepCosts(
        seconds=costs.tolist(),
        source=source,
        error=float(np.abs(predicted / measured - 1).mean()),
        total_error=float(abs(predicted.sum() / measured.sum() - 1)),
    )


def _non_negative_least_squares(matrix: Features, target: Features) -> Features:
    """Descend by coordinates: each coefficient at its best given the others, or 0 where that is negative."""
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(float).tiny)
    matrix = matrix / scale
    products, towards = matrix.T @ matrix, matrix.T @ target
    used = np.flatnonzero(products.diagonal()).tolist()
    solution = np.zeros(len(scale))
    for _ in range(MOST_SWEEPS):
        before = solution.copy()
        for i in used:
            rest = towards[i] - products[i] @ solution
            solution[i] = max(0.0, solution[i] + rest / products[i, i])
        if np.abs(solution - before).max() <= 1e-12 * np.abs(solution).max():
            break
    return solution / scale


def write_records(path: Path, records: Sequence[StepRecord]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def read_records(path: Path) -> list[StepRecord]:
    """Read a file of records. Raise ValueError that names it."""
    try:
        lines = path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=StepRecord) for line in lines if line]
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no file of step records: {error}") from error
