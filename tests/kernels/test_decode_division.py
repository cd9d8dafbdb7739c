"""Into how many programs decode attention divides rows, and which part of which row a program takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.attention.hopper_decode.decode import programs_of_group
from quire.kernels.attention.hopper_decode.division import part_of_group, part_of_program
from quire.kernels.attention.hopper_decode.products import LANES
from quire.kernels.attention.splits import (
    DecodeWorkspace,
    Division,
    most_tiles,
    plan_division,
    plan_hopper_splits,
    plan_small_hopper_splits,
    plan_small_splits,
    plan_splits,
    spares_room,
)

MULTIPROCESSORS = 132


@pytest.mark.parametrize("max_batch", [1, 3, 8, 64, 256, 1000])
def test_the_workspace_holds_every_plan(max_batch: int) -> None:
    workspace = DecodeWorkspace.allocate(max_batch, 32, 1, "meta")
    capacity = len(workspace.lse)
    too_many = max_batch + 512
    assert plan_division(too_many, 1, 128, MULTIPROCESSORS, workspace) == (too_many * 3 // 8, 1, too_many, 1)
    for batch in {*range(1, max_batch, 7), 34, 35, 67, 135, max_batch}:
        if batch > max_batch:
            continue
        for kv_heads in (1, 2, 8, 32):
            for max_tiles in (1, 7, 64, 4096):
                counts = [plan(batch, kv_heads, max_tiles) for plan in (plan_splits, plan_small_splits)]
                for plan in (plan_hopper_splits, plan_small_hopper_splits):
                    counts += [plan(batch, kv_heads, dim, max_tiles) for dim in (64, 128, 256)]
                for splits in counts:
                    assert 1 <= splits <= max_tiles
                    assert splits == 1 or splits * batch <= capacity
            splits = plan_division(batch, kv_heads, 128, MULTIPROCESSORS, workspace).most
            assert splits == 1 or (splits * batch <= capacity and batch * kv_heads <= len(workspace.arrivals))


@given(st.integers(1, 400), st.integers(0, 200), st.sampled_from([1, 16, 64]), st.booleans())
def test_no_row_reads_more_tiles(tokens: int, window: int, tile: int, chunked: bool) -> None:
    def tiles(length: int) -> int:
        first = 0
        if window:
            first = (length - 1) // window * window if chunked else max(length - window, 0)
        return (length - 1) // tile - first // tile + 1

    read = max(tiles(length) for length in range(1, tokens + 1))
    most = most_tiles(tokens, window, tile)
    assert read <= most
    # No more than one tile beyond, and none where windows begin at any token of many.
    assert chunked or most == read or tokens < window + tile


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


@pytest.mark.parametrize(
    ("batch", "programs", "dim", "splits", "spares"),
    [
        (1, 8, 128, 32, True),
        (1, 8, 128, 24, False),  # 192 programs of 256
        (1, 8, 128, 25, True),
        (4, 8, 128, 8, True),
        (5, 8, 128, 6, False),
        (8, 8, 128, 4, False),
        (4, 8, 64, 16, True),
        (4, 8, 64, 12, False),
        (1, 8, 64, 32, False),  # half of the device
        (256, 8, 128, 1, False),
    ],
)
def test_many_splits_of_a_full_device_leave_room(
    batch: int, programs: int, dim: int, splits: int, spares: bool
) -> None:
    assert spares_room(batch, programs, dim, splits) == spares


@given(*[st.integers(0, 40)] * 3, *[st.integers(1, 9)] * 2)
def test_a_program_for_each_part_of_a_row(
    long_rows: int, rows_of_one: int, left_rows: int, long_splits: int, left_splits: int
) -> None:
    """In the order of rows and parts."""
    counts = [long_splits] * long_rows + [1] * rows_of_one + [left_splits] * left_rows
    division = Division(long_rows, long_splits, long_rows + rows_of_one, left_splits)
    found = [part_of_program.fn(program, *division) for program in range(division.programs(len(counts)))]
    assert found == [(place, split, parts) for place, parts in enumerate(counts) for split in range(parts)]
    assert max(counts, default=1) <= division.most


@given(st.integers(1, 8), st.integers(1, 100))
def test_programs_share_a_group_of_many_heads(kv_heads: int, group: int) -> None:
    """Each head is some program's, and none has more than there are lanes."""
    programs = programs_of_group(group)
    found = [part_of_group.fn(program, group, programs) for program in range(kv_heads * programs)]
    heads = [kv_head * group + before + lane for kv_head, before, own in found for lane in range(own)]
    assert heads == [*range(kv_heads * group)]
    assert max(own for _, _, own in found) == -(-group // programs) <= LANES.value


@given(st.integers(1, 600), st.integers(1, 128), st.sampled_from([64, 128]), st.integers(1, 132))
def test_a_division_fits_the_batch(batch: int, kv_heads: int, head_dim: int, multiprocessors: int) -> None:
    workspace = DecodeWorkspace.allocate(batch, kv_heads, head_dim, "meta")
    division = plan_division(batch, kv_heads, head_dim, multiprocessors, workspace)
    assert 0 <= division.long_rows <= division.undivided <= batch
    assert division.long_rows < batch  # the row behind them is looked at
    assert division.most == 1 or division.most * batch <= len(workspace.lse)
