"""The sampling parameters of rows, as the device sees them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.device.row_sampling import RowState
from quire.engine.device.staging import Staging
from quire.engine.messages import SamplingParams
from quire.engine.schedule.plan import RowStart

ROWS = 4
CPU = torch.device("cpu")
floats = st.floats(2**-6, 1, width=32)


@st.composite
def starts(draw: st.DrawFn) -> RowStart:
    params = SamplingParams(
        temperature=draw(floats | st.just(0.0)),
        top_p=draw(floats),
        top_k=draw(st.integers(0, 50)),
        min_p=draw(floats),
        seed=draw(st.integers(0, 2**63 - 1)),
    )
    row, index = draw(st.integers(0, ROWS - 1)), draw(st.integers(0, 9))
    return RowStart(row, index, params, 1, frozenset(), [], [], 0)


@given(st.lists(st.lists(starts(), max_size=3), max_size=4))
def test_each_row_samples_as_it_last_began(steps: list[list[RowStart]]) -> None:
    state = RowState(ROWS, CPU, Staging(64, CPU))
    began: dict[int, RowStart] = {}
    for step in steps:
        state.start(tuple(step))
        began |= {start.row: start for start in step}
        on_device = state.state
        for row in range(ROWS):
            params = began[row].params if row in began else SamplingParams(temperature=0, seed=0)
            assert on_device.temperature[row] == params.temperature and on_device.top_p[row] == params.top_p
            assert on_device.min_p[row] == params.min_p and on_device.top_k[row] == params.top_k
            assert on_device.seed[row] == params.seed
            assert on_device.index[row] == (began[row].index if row in began else 0)


def test_a_share_that_fp32_does_not_have_is_the_least_that_it_has() -> None:
    """It keeps the best token; as 0 it would be none, and ranks that search together would keep all."""
    state = RowState(ROWS, CPU, Staging(64, CPU))
    state.start((RowStart(1, 0, SamplingParams(top_p=1e-50), 1, frozenset(), [], [], 0),))
    assert 0 < state.state.top_p[1] < 1e-37
