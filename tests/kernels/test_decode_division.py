"""Into how many programs decode attention divides rows, and which part of which row a program takes."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import decode_division
from kernels.decode_splits import DecodeWorkspace, plan_division, plan_small_splits, plan_splits

MULTIPROCESSORS = 132


@pytest.mark.parametrize("max_batch", [1, 3, 8, 64, 256, 1000])
def test_the_workspace_holds_every_plan(max_batch: int) -> None:
    workspace = DecodeWorkspace.allocate(max_batch, 1, 1, "meta")
    capacity = workspace.lse.numel()
    assert plan_division(max_batch + 512, 1, 128, MULTIPROCESSORS, workspace).most == 1
    for batch in {1, (max_batch + 1) // 2, max_batch}:
        for kv_heads in (1, 2, 8, 32):
            for max_tiles in (1, 7, 64, 4096):
                for plan in (plan_splits, plan_small_splits):
                    splits = plan(batch, kv_heads, max_tiles)
                    assert 1 <= splits <= max_tiles
                    assert splits == 1 or splits * batch <= capacity
            splits = plan_division(batch, kv_heads, 128, MULTIPROCESSORS, workspace).most
            assert splits == 1 or (splits * batch <= capacity and batch * kv_heads <= len(workspace.arrivals))


@pytest.mark.parametrize(
    ("batch", "kv_heads", "head_dim", "division"),
    [
        (1, 8, 128, (0, 3, 1, 1)),
        (33, 8, 128, (12, 3, 33, 1)),  # 264 programs, as many as run at once
        (34, 8, 128, (12, 3, 33, 8)),
        (35, 8, 128, (13, 3, 33, 8)),  # 16 more, whose parts fill half the device
        (36, 8, 128, (13, 3, 33, 5)),
        (37, 8, 128, (13, 3, 33, 4)),
        (41, 8, 128, (15, 3, 33, 4)),  # 64 more, each in as many parts as run at once
        (42, 8, 128, (15, 3, 33, 3)),
        (44, 8, 128, (16, 3, 33, 3)),
        (45, 8, 128, (16, 3, 33, 2)),
        (49, 8, 128, (18, 3, 33, 2)),
        (50, 8, 128, (18, 3, 50, 1)),  # half of which would not run at once with the others
        (34, 8, 64, (12, 3, 34, 1)),
        (67, 4, 128, (25, 3, 66, 7)),
        (25, 12, 128, (9, 3, 22, 4)),
        (65, 8, 128, (24, 1, 65, 1)),
    ],
)
def test_rows_that_would_run_nearly_alone_are_divided(
    batch: int, kv_heads: int, head_dim: int, division: tuple[int, int, int, int]
) -> None:
    workspace = DecodeWorkspace.allocate(batch, 2 * kv_heads, head_dim, "meta")
    assert plan_division(batch, kv_heads, head_dim, MULTIPROCESSORS, workspace) == division


def test_no_row_is_divided_further_than_there_is_room() -> None:
    workspace = DecodeWorkspace.allocate(265, 1, 128, "meta")
    assert plan_division(265, 1, 128, MULTIPROCESSORS, workspace) == (99, 1, 264, 1)


@given(st.integers(1, 600), st.sampled_from([1, 2, 3, 5, 8, 12, 16, 40, 64, 128]), st.sampled_from([64, 128]))
def test_a_program_for_each_part_of_a_row(batch: int, kv_heads: int, head_dim: int) -> None:
    """In the order of rows and parts. The function is the kernel's, of all programs at once."""
    workspace = DecodeWorkspace.allocate(batch, kv_heads, head_dim, "meta")
    division = plan_division(batch, kv_heads, head_dim, MULTIPROCESSORS, workspace)
    assert division.long_rows <= division.undivided <= batch
    counts = [division.long_splits] * division.long_rows
    counts += [1] * (division.undivided - division.long_rows)
    counts += [division.left_splits] * (batch - division.undivided)
    with patch.object(decode_division.gl, "where", np.where):
        parts_of = decode_division.part_of_program.fn(np.arange(division.programs(batch)), *division)
    expected = [(place, split, parts) for place, parts in enumerate(counts) for split in range(parts)]
    assert list(zip(*(numbers.tolist() for numbers in parts_of), strict=True)) == expected
    assert max(counts) <= division.most
