"""What rank 0 says of a step is what the others read."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import fields, replace

from quire.engine.parallel.frames import Capture, Step, decode, encode_capture, encode_step
from quire.engine.schedule.plan import StepPlan
from quire.loadtest.rank_messages import plans


def assert_alike(found: StepPlan, plan: StepPlan) -> None:
    for field in fields(plan):
        mine, theirs = getattr(plan, field.name), getattr(found, field.name)
        if isinstance(mine, np.ndarray):
            assert theirs.dtype == mine.dtype and theirs.shape == mine.shape, field.name
            assert (theirs == mine).all(), field.name
        else:
            assert theirs == mine, field.name


@pytest.mark.parametrize("name", plans())
def test_a_step_is_read_as_it_was_said(name: str) -> None:
    """With empty arrays among the others, pairs, and a column of a larger array."""
    pairs = np.arange(12, dtype=np.int32).reshape(6, 2)
    plan = replace(
        plans()[name], copies=pairs, table_blocks=np.repeat(pairs, 64, 0)[: len(plans()[name].table_rows), 1]
    )
    message = decode(bytearray(encode_step(plan, 3)))
    assert isinstance(message, Step) and message.booked == 3
    assert_alike(message.plan, plan)


@pytest.mark.parametrize("missed", [False, True])
def test_a_capture_is_read_as_it_was_said(missed: bool) -> None:
    assert decode(bytearray(encode_capture(missed=missed))) == Capture(missed)
