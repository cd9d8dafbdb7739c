"""Times of single steps over a grid of batches, contexts and prompts, for the simulator's costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np

from quire.engine.arrays import Int32, empty_int32
from quire.engine.device.runner import ModelRunner
from quire.engine.messages import SamplingParams
from quire.engine.schedule.plan import RowStart, StepHandle, StepPlan
from quire.loadtest.simulator.recording import RecordingRunner
from quire.loadtest.simulator.step_costs import StepRecord

BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (32, 128, 512, 1024, 2000)
PREFILLS = ((1, 16), (1, 64), (1, 128), (1, 256), (1, 512), (1, 1024), (4, 256), (1, 2048), (8, 256))
EXTENDS = ((256, 1024), (256, 2000))  # (queries, context)
REPEATS = 4

Work = list[tuple[int, int]]
"""(queries, context) of each row; decodes, of one query, come first."""


def works() -> Iterator[Work]:
    """Yield what the steps of the grid compute."""
    yield from ([(1, context)] * batch for batch, context in product(BATCHES, CONTEXTS))
    yield from ([(length, length)] * count for count, length in PREFILLS)
    yield from ([extend] for extend in EXTENDS)
    yield from (
        [(1, 256)] * batch + [(length, length)] for batch, length in product((16, 64), (64, 256, 1024))
    )


def record_steps(runner: ModelRunner) -> list[StepRecord]:
    """Run each step of the grid that fits, one behind the other as in an engine, and time it."""
    limits, num_blocks = runner.limits, len(runner.cache.blocks)
    records: list[StepRecord] = []
    for work in works():
        tokens = sum(queries for queries, _ in work)
        longest = max(context for _, context in work)
        blocks = -(-longest // runner.cache.block_size)
        if (
            len(work) * blocks <= num_blocks
            and len(work) <= limits.max_num_seqs
            and tokens <= limits.max_num_batched_tokens
            and longest <= limits.max_model_len
        ):
            runner.launch(table_plan(len(work), blocks)).wait()
            records += _time(runner, step_plan(work))
    return records


def _time(runner: ModelRunner, plan: StepPlan) -> list[StepRecord]:
    recorder = RecordingRunner(runner)
    handles: deque[StepHandle] = deque()
    for _ in range(REPEATS + 1):
        handles.append(recorder.launch(plan))
        if len(handles) > 1:
            handles.popleft().wait()
    handles.popleft().wait()
    return recorder.records[1:]  # nothing ran while the first was launched


def table_plan(rows: int, blocks: int) -> StepPlan:
    """Plan a step that computes nothing: so many rows begin, each with so many blocks that are its alone."""
    empty = empty_int32()
    params = SamplingParams(temperature=1.0)
    return StepPlan(
        rows=empty,
        num_decodes=0,
        query_lens=empty,
        context_lens=empty,
        prefill_tokens=empty,
        starts=tuple(RowStart(row, 0, params, 1, frozenset(), [], [], 0) for row in range(rows)),
        table_rows=np.repeat(_range(rows), blocks),
        table_columns=np.tile(_range(blocks), rows),
        table_blocks=_range(rows * blocks),
    )


def step_plan(work: Work) -> StepPlan:
    """Plan a step that samples one token from the end of each row."""
    queries, contexts = (np.array(column, np.int32) for column in zip(*work, strict=True))
    num_decodes = int((queries == 1).sum())
    return msgspec.structs.replace(
        table_plan(0, 0),
        rows=_range(len(work)),
        num_decodes=num_decodes,
        query_lens=queries,
        context_lens=contexts,
        prefill_tokens=np.full(int(queries.sum()) - num_decodes, 5, np.int32),
        sample_rows=_range(len(work)),
        sample_tokens=queries.cumsum(dtype=np.int32) - 1,
        sample_positions=contexts,
    )


def _range(count: int) -> Int32:
    return np.arange(count, dtype=np.int32)
