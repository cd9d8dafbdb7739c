"""How a step's prompts are cut for kernels that keep states: tensors alone, against a loop over rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.models.general.state_chunks import state_steps
from quire.kernels.attention.batch import DecodeBatch, ForwardBatch, PrefillBatch
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.recurrence.operations import REFERENCES
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE, PADS

WIDTH = 64  # blocks of a table


def of_rows(tables: torch.Tensor, rows: list[tuple[int, int, int]], token: int, block_size: int) -> list:
    """The chunks of (row, tokens before, new ones), as the loop that this is meant to be."""
    size, found = min(CHUNK, block_size), []
    for at, (row, first, new) in enumerate(rows):
        begin = first
        while begin < first + new:
            end = min(first + new, (begin // size + 1) * size)
            before = (
                NO_STATE
                if begin == 0
                else CARRIED
                if begin > first
                else tables[row][(begin - 1) // block_size]
            )
            leaves = end == first + new or end % block_size == 0
            after = tables[row][(end - 1) // block_size] if leaves else -1
            found.append((first, at, [token + begin - first, end - begin, int(before), int(after)]))
            begin = end
        token += new
    return [each for *_, each in sorted(found)]


def prefill(tables: torch.Tensor, rows: list[tuple[int, int, int]], decodes: int) -> PrefillBatch:
    starts = torch.tensor([decodes, *(new for *_, new in rows)]).cumsum(0).int()
    lens = torch.tensor([first + new if new else 0 for _, first, new in rows]).int()
    return PrefillBatch(tables, torch.tensor([row for row, *_ in rows]).int(), starts, lens, 1)


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 300)), min_size=1, max_size=4),
    st.lists(st.integers(0, 700), max_size=3),
    st.sampled_from([16, 64, 256]),
    st.integers(0, 9),
)
def test_chunks_are_those_of_a_loop_over_rows(prompts, decodes, block_size, padding) -> None:
    count = len(decodes)
    entries = (count + len(prompts)) * WIDTH
    tables = torch.randperm(2 * entries).view(2, -1, WIDTH).int()  # of two cache groups
    rows = [(count + i, first, new) for i, (first, new) in enumerate(prompts)]
    tokens = torch.zeros(count + sum(new for *_, new in rows) + padding, dtype=torch.int32)
    lens = torch.tensor(decodes, dtype=torch.int32)
    groups = [
        ForwardBatch(
            tokens,
            tokens,
            tokens.long(),
            DecodeBatch(table, torch.arange(count).int(), lens, lens, DecodeGather()),
            prefill(table, rows, count),
        )
        for table in tables
    ]
    for table, step in zip(tables, state_steps(groups, block_size, REFERENCES), strict=True):
        used = int(step.last_used)
        assert used == (step.chunks[:, 1] > 0).sum()
        assert step.chunks[:used].tolist() == of_rows(table, rows, count, block_size)
        assert (step.chunks[used:, 1] == 0).all() and (step.chunks[used:, 3] == -1).all()
        for at, length in enumerate(decodes):
            before, after = int(step.before[at]), int(step.after[at])
            assert after == (table[at][(length - 1) // block_size] if length else PADS)
            assert before == (table[at][(length - 2) // block_size] if length > 1 else NO_STATE)
