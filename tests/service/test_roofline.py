"""The bound beside which `quire bench` reports: no step takes less than it says."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from quire.engine.config import EngineConfig, EngineInfo
from quire.engine.device.runner import ModelRunner
from quire.engine.models.native_config import read_native
from quire.engine.schedule.plan import StepPlan
from quire.engine.startup import start_engine
from quire.loadtest.offline.roofline import NOTHING, Ceilings, Needs, mean, needs_of
from tests.models.paged_driver import PagedDriver

Row = tuple[int, int]  # tokens computed in a step, and tokens in the cache then


def plan(decodes: list[int], prefills: list[Row], num_sampled: int | None = None) -> StepPlan:
    """Rows that decode at these contexts, and chunks, of which the last so many are sampled from (or all)."""
    queries = [*([1] * len(decodes)), *(query for query, _ in prefills)]
    ends = np.cumsum(queries, dtype=np.int32) - 1
    first = 0 if num_sampled is None else len(ends) - num_sampled
    return StepPlan(
        rows=np.arange(len(queries), dtype=np.int32),
        num_decodes=len(decodes),
        query_lens=np.array(queries, np.int32),
        context_lens=np.array([*decodes, *(context for _, context in prefills)], np.int32),
        prefill_tokens=np.zeros(sum(query for query, _ in prefills), np.int32),
        sample_tokens=ends[first:].astype(np.int32),
    )


def info(windows: tuple[int, ...], **others: int) -> EngineInfo:
    """A model whose numbers are 1, but for those given; fp32."""
    ones: dict[str, Any] = dict.fromkeys(EngineInfo.__struct_fields__, 1)
    ones |= {"group_windows": (), "pooling": None, "merged": None}
    return EngineInfo(**{**ones, "dtype": "float32", "windows": windows, **others})


@pytest.mark.parametrize("name", ["llama-tied-linear", "qwen3-bias", "opt-no-bias", "gpt2"])
def test_a_step_has_at_least_the_bounds_arithmetic(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    core, of_model = start_engine(
        EngineConfig(model=str(folder), dtype="float32", num_gpu_blocks_override=4, swap_space=0)
    )
    assert isinstance(core.runner, ModelRunner)
    driver = PagedDriver(core.runner.model, read_native(folder), rows=8, max_len=100)
    for decodes, chunks in (
        ({}, {row: [5] * 12 for row in range(8)}),
        ({0: 1, 1: 2}, {row: [7] * 20 for row in range(2, 8)}),
        (dict.fromkeys(range(8), 3), {}),
    ):
        with FlopCounterMode(display=False) as counter:
            driver.step_of_newest(decodes, chunks)
        lengths = driver.lengths
        step = plan([lengths[row] for row in decodes], [(len(chunks[row]), lengths[row]) for row in chunks])
        needed = needs_of(step, sum(lengths), of_model).flops
        assert counter.get_total_flops() / 2 < needed <= counter.get_total_flops()


rows = st.tuples(st.integers(1, 9), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair)))


@given(
    st.lists(st.integers(1, 20), max_size=4),
    st.lists(rows, max_size=4),
    st.lists(st.sampled_from([0, 1, 3, 7, 50]), min_size=1, max_size=4),
)
def test_attention_is_counted_query_by_query(
    decodes: list[int], prefills: list[Row], windows: list[int]
) -> None:
    """Of a model without weights: keys that some query sees, and pairs, of layers with windows."""
    model = info(tuple(windows), layer_weights=0, head_weight_bytes=0, bytes_per_block=len(windows))
    step = plan(decodes, prefills)
    needs = needs_of(step, int(step.context_lens.sum()), model)

    def seen(query: int, context: int, window: int) -> list[set[int]]:
        """The positions that each token of a row sees."""
        return [set(range(max(0, p + 1 - (window or inf)), p + 1)) for p in range(context - query, context)]

    keys = {"decode": 0, "prefill": 0}
    pairs = {"decode": 0, "prefill": 0}
    for layer, window in enumerate(windows):
        for context in decodes:
            each = seen(1, context, window)
            keys["decode"] += len(set().union(*each))
            pairs["decode"] += sum(map(len, each))
        for query, context in prefills:
            each = seen(query, context, window)
            last = layer == len(windows) - 1
            keys["prefill"] += query if last else len(set().union(*each))
            pairs["prefill"] += 0 if last else sum(map(len, each))
    assert needs.decode_bytes == pytest.approx(keys["decode"])
    assert needs.prefill_bytes == pytest.approx(keys["prefill"])
    assert (needs.decode_flops, needs.prefill_flops) == (4 * pairs["decode"], 4 * pairs["prefill"])
    assert (needs.decode_tokens, needs.prefill_tokens) == (len(decodes), sum(q for q, _ in prefills))


def test_what_rows_share_is_read_once_and_weights_are_read_once() -> None:
    weights = {"body_weight_bytes": 1000, "layer_weights": 120, "head_weight_bytes": 500}
    model = info((0, 0), bytes_per_block=64, block_size=2, **weights)
    alone, shared = (needs_of(plan([100] * 4, []), tokens, model) for tokens in (400, 130))
    assert alone.decode_bytes == 400 * 32
    assert shared.decode_bytes == pytest.approx(130 * 32)
    assert alone.weight_bytes == shared.weight_bytes == 1500
    assert alone.flops == shared.flops == 4 * 2 * (120 * 2 + 500 / 4 + 2 * 2 * 100)


def test_of_a_prompts_tokens_only_sampled_ones_owe_the_vocabulary() -> None:
    model = info((0, 0, 0, 0), query_width=0, layer_weights=250, head_weight_bytes=400)
    chunks = [(8, 8), (4, 20)]
    none, both = (needs_of(plan([], chunks, sampled), 28, model) for sampled in (0, 2))
    assert none.prefill_flops == 2 * 250 * 12 * 3
    assert both.prefill_flops == none.prefill_flops + 2 * 2 * 100


def test_a_step_reads_while_it_computes() -> None:
    needs = Needs(100, 1, 200, 5000, 1, 300, 1000)
    assert (needs.bytes, needs.flops) == (600, 6000)
    assert needs.seconds(Ceilings(bandwidth=100, flops=inf)) == 6
    assert needs.seconds(Ceilings(bandwidth=100, flops=500)) == 12
    assert mean([needs, NOTHING]) == Needs(50, 0.5, 100, 2500, 0.5, 150, 500)


def test_a_step_that_only_moves_blocks_needs_nothing() -> None:
    assert needs_of(plan([], []), 100, info((0,))) == needs_of(None, 100, info((0,))) == NOTHING
