"""Tokens in rows: as in a list for each, and never in the line of who has taken the row meanwhile."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.arrays import as_blocks, empty_int32
from quire.engine.capacity import Capacity
from quire.engine.hashing import BlockHasher
from quire.engine.messages import Request, SamplingParams, StepOutputs
from quire.engine.schedule.commit import finish_transfers
from quire.engine.schedule.invariants import check_scheduler
from quire.engine.schedule.lifecycle import preempt
from quire.engine.schedule.plan import StepPlan, StepResult
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequences.row_tokens import RowTokens
from quire.engine.sequences.sequence import Sequence

ROWS = 5
MAX_TOKENS = 19
STOP = 9
FIRST, LATE, NEWER = 20, 30, 40  # tokens: of sampled row r, this much and r


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(block_size=st.sampled_from([1, 2, 4, 16]), seed=st.integers(0, 1 << 32))
def test_lines_are_lists(block_size: int, seed: int) -> None:
    rng = random.Random(seed)
    lines = RowTokens(ROWS, MAX_TOKENS, block_size)
    lists: list[list[int]] = [[] for _ in range(ROWS)]
    for _ in range(60):
        row, token = rng.randrange(ROWS), rng.randrange(-(1 << 31), 1 << 31)
        operation = rng.choice(["put", "copy", "append", "write", "write", "write", "clear"])
        free = [r for r in range(ROWS) if len(lists[r]) < MAX_TOKENS]
        if operation == "put":
            lists[row] = [token + i if token < 0 else token - i for i in range(rng.randint(1, MAX_TOKENS))]
            lines.put(row, np.array(lists[row], np.int32))
        elif operation == "copy":
            other = rng.randrange(ROWS)
            lists[row] = list(lists[other])
            lines.put(row, lines.of(other))
        elif operation == "append" and row in free:
            lists[row].append(token)
            lines.append(row, token)
        elif operation == "write":
            rows = rng.sample(free, rng.randint(0, len(free)))
            tokens = [rng.randrange(1 << 31) for _ in rows]
            positions = np.array([len(lists[r]) for r in rows], np.int32)
            lines.write(np.array(rows, np.intp), positions, np.array(tokens, np.int32))
            for r, each in zip(rows, tokens, strict=True):
                lists[r].append(each)
        elif operation == "clear":
            lists[row] = []
            lines.clear(row)
        for r, known in enumerate(lists):
            assert lines.of(r).tolist() == known
            blocks = [known[i : i + block_size] for i in range(0, len(known) - block_size + 1, block_size)]
            contents = [np.array(block, "<i4").tobytes() for block in blocks]
            first = rng.randint(0, len(blocks))
            assert lines.block_contents(r, first, len(blocks)) == contents[first:]
            assert as_blocks(np.array(known, np.int32), block_size).tolist() == contents


class Rig:
    """A scheduler of two rows and three requests, stepped by hand."""

    def __init__(self) -> None:
        capacity = Capacity(num_blocks=40, block_size=2, max_num_seqs=2, max_model_len=40, vocab_size=100)
        hasher = BlockHasher(2, seed=0)
        self.scheduler = Scheduler(capacity, 40, (STOP,), hasher=hasher, num_host_blocks=40)
        self.state = self.scheduler.state

    def add(self, request_id: int) -> Sequence:
        params = SamplingParams(max_tokens=10)
        self.scheduler.add(Request(request_id, [request_id + 1] * 5, params))
        (sequence,) = self.state.waiting[-1].sequences
        return sequence

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, tokens: np.ndarray) -> StepOutputs:
        result = StepResult(tokens.astype(np.int32), empty_int32(), None, ())
        outputs = self.scheduler.commit(result)
        if self.state.transfers:
            finish_transfers(self.scheduler.state)
        check_scheduler(self.scheduler.state)
        return outputs


def of(outputs: StepOutputs, request_id: int) -> list[int]:
    tokens = [token for output in outputs if output.request_id == request_id for token in output.tokens]
    assert all(type(token) is int for token in tokens)
    return tokens


def test_more_addresses_than_there_are_is_refused_with_the_numbers_and_the_flag() -> None:
    for rows in (1 << 40, 1 << 80):
        with pytest.raises(ValueError, match=r"take [\d,.]+ GiB, and the host has .*--max-num-seqs"):
            RowTokens(rows, MAX_TOKENS, 16)


@pytest.mark.parametrize("how", ["stop", "abort", "recompute", "swap"])
def test_a_late_step_does_not_write_to_who_has_the_row_by_then(how: str) -> None:
    """A step is in flight while one of its rows is left and given to another: nobody's tokens are lost."""
    rig = Rig()
    older, left = rig.add(0), rig.add(1)
    for _ in range(3):
        plan = rig.schedule()
        rig.commit(plan, FIRST + plan.sample_rows)
    row, known, others = left.row, left.tokens.tolist(), older.tokens.tolist()
    group = left.group
    if how == "stop":
        plan, late = rig.schedule(), rig.schedule()
        known.append(STOP)
        others.append(FIRST + older.row)
        rig.commit(plan, np.where(plan.sample_rows == row, STOP, FIRST + plan.sample_rows))
        assert left.finish_reason == "stop"
    else:
        late = rig.schedule()
        if how == "abort":
            rig.scheduler.abort(1)
        else:
            swapped = how == "swap" and rig.scheduler.blocks.swap_out(group)
            assert swapped == (how == "swap")
            preempt(rig.state, group, swapped=swapped)
            rig.state.waiting.remove(group)  # set aside, as when requests are tried apart
            rig.state.in_turn = False
    newer = rig.add(2)
    begins = rig.schedule()
    assert newer.row == row and left.row < 0
    if left.finish_reason is None:
        rig.state.waiting.append(group)
    outputs = rig.commit(late, LATE + late.sample_rows)
    assert newer.tokens.tolist() == [3] * 5
    assert older.tokens.tolist() == [*others, LATE + older.row]
    kept = [LATE + row] if left.finish_reason is None else []
    assert left.tokens.tolist() == known + kept
    assert of(outputs, 0) == [LATE + older.row] and of(outputs, 1) == kept
    outputs = rig.commit(begins, NEWER + begins.sample_rows)
    assert newer.tokens.tolist() == [3] * 5 + of(outputs, 2)
    assert of(outputs, 2) == [NEWER + row]
    assert left.tokens.tolist() == known + kept
