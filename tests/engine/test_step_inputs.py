"""The inputs of a mixed step name each row's newest token, in a graph of any size too."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.device.graphs import mixed_sizes
from quire.engine.device.inputs import idle_mixed, mixed_inputs, newest_inputs
from quire.engine.device.staging import PaddedInputs, Staging
from quire.engine.schedule.plan import StepPlan

CPU = torch.device("cpu")
MAX_ROWS = 40


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Decodes and at least one chunk, of rows in any order, on contexts of any length."""
    rows = draw(st.permutations(range(MAX_ROWS)))[: draw(st.integers(1, MAX_ROWS))]
    decodes = draw(st.integers(0, len(rows) - 1))
    longest = draw(st.sampled_from([1, 3, 50]))
    chunks = [draw(st.integers(1, longest)) for _ in rows[decodes:]]
    lengths = np.array([1] * decodes + chunks, np.int32)
    cached = [draw(st.integers(0, 60)) for _ in rows]
    return StepPlan(
        rows=np.array(rows, np.int32),
        num_decodes=decodes,
        query_lens=lengths,
        context_lens=lengths + np.array(cached, np.int32),
        prefill_tokens=np.arange(sum(chunks), dtype=np.int32),
    )


@given(plan=plans())
def test_each_rows_newest_token_is_named_once(plan: StepPlan) -> None:
    tokens, rows, context_lens, order = newest_inputs(plan)
    token_rows, positions = mixed_inputs(plan).token_rows, mixed_inputs(plan).positions
    assert all(array.dtype == np.int32 for array in (tokens, rows, context_lens, order))
    newest = {row: int(positions[token_rows == row].max()) for row in plan.rows.tolist()}
    assert rows.tolist() == list(newest) == token_rows[tokens].tolist()
    assert positions[tokens].tolist() == (context_lens - 1).tolist() == list(newest.values())
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert (np.diff(context_lens[order]) <= 0).all()


@given(plan=plans(), max_rows=st.integers(MAX_ROWS, 3 * MAX_ROWS))
def test_a_graph_has_room_for_the_newest_tokens_of_its_tokens(plan: StepPlan, max_rows: int) -> None:
    """The rows left over are the one that pads, and attend to nothing."""
    arrays = newest_inputs(plan)
    for size in mixed_sizes(MAX_ROWS * 50, 1000):
        if size < plan.num_tokens:
            continue
        padded = PaddedInputs(idle_mixed(size, max_rows)[1], CPU)
        assert padded.hold(arrays)
        Staging(len(padded.words), CPU).upload_into(padded, arrays)
        tokens, rows, context_lens, order = (view.tolist() for view in padded.split())
        own = len(plan.rows)
        assert [tokens[:own], rows[:own], context_lens[:own], order[:own]] == [a.tolist() for a in arrays]
        assert set(rows[own:]) <= {max_rows} and not any(context_lens[own:])
        assert sorted(order) == list(range(len(rows))) == list(range(len(tokens)))
        assert all(0 <= token < size for token in tokens)
