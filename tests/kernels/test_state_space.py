"""Mamba 2's scan: transformers' is the measure of the loop over tokens, and that one of the kernels."""

import itertools
from typing import Any

import pytest
import torch
from paged import with_dtypes
from state_steps import BLOCKS, draw_step, in_turn

from quire.kernels.recurrence.state_space import state_space_scan, state_space_scan_reference
from quire.kernels.recurrence.state_space_chunks import NARROWEST_SLICE, chunk_tile
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE

NO_LIMIT = (0.0, float("inf"))
# Of kernels whose products round tokens' fp32 weights to tf32, for 16 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-3}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tokens_of(
    count: int, heads: int, rows: int, groups: int, columns: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Draw tokens as a projection has them: views of one tensor; and a layer's weights."""
    sizes = [heads * rows, groups * columns, groups * columns, heads]
    x, B, C, dt = torch.randn(count, sum(sizes) + 8, device=device).to(dtype)[:, 8:].split(sizes, 1)
    return {
        "x": x.unflatten(1, (heads, rows)),
        "dt": dt,
        "A": -torch.rand(heads, device=device) * 4,
        "B": B.unflatten(1, (groups, columns)),
        "C": C.unflatten(1, (groups, columns)),
        "D": torch.randn(heads, device=device).to(dtype),
        "dt_bias": torch.randn(heads, device=device).to(dtype) - 2.0,
        "dt_limit": NO_LIMIT,
    }


def states_of(given: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (BLOCKS, *given["x"].shape[1:], given["B"].shape[2])
    return torch.randn(shape, device=given["x"].device).to(dtype)


def close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Assert that two agree, by the size of what was added up."""
    expected = expected.float()
    torch.testing.assert_close(
        ours.float(), expected, rtol=tolerance, atol=tolerance * (1.0 + float(expected.abs().max()))
    )


# Heads, rows and columns of a state, groups: one slice, several, what is padded, and Mamba 2's own.
SHAPES = [(2, 16, 16, 1), (2, 48, 32, 2), (4, 12, 20, 2), (3, 8, 64, 1)]
# States in parts of their columns, of which the last may be padded.
SHAPES += [(2, 16, 256, 1), (2, 24, 136, 2), (2, 24, 192, 1), (1, 16, 256, 1)]


@pytest.mark.parametrize(("shape", "dtype"), with_dtypes(itertools.product(SHAPES)))
def test_kernels_scan_as_the_loop_does(shape, dtype, device):
    heads, rows, columns, groups = shape
    drawn = draw_step(device)
    given = tokens_of(drawn.tokens, heads, rows, groups, columns, dtype, device)
    state = states_of(given)
    around = torch.cat([state[-1:], state])  # with a block ahead of the first
    ours, expected = around[1:], state.clone()
    out = state_space_scan(**given, state=ours, step=drawn.step)
    theirs = state_space_scan_reference(**given, state=expected, step=drawn.step)
    assert out.dtype == torch.float32
    close(out[drawn.owned], theirs[drawn.owned], TOLERANCE[dtype])
    assert not out[drawn.padding].any() and not theirs[drawn.padding].any()
    for block in drawn.written:
        close(ours[block], expected[block], TOLERANCE[dtype])
    assert torch.equal(ours[drawn.others], state[drawn.others]) and torch.equal(around[0], state[-1])


@pytest.mark.parametrize("limits", [NO_LIMIT, (0.05, 0.1)])
@pytest.mark.parametrize("weighted", [True, False])
def test_time_steps_have_limits_and_weights_may_be_missing(weighted, limits, device):
    drawn = in_turn([(0, 0)], [(20, NO_STATE, 1)], device)
    given = tokens_of(drawn.tokens, 2, 16, 1, 16, torch.float32, device) | {"dt_limit": limits}
    given["dt"] = given["dt"] * 12.0  # some beyond 20, where softplus is its argument, and some close to 0
    if not weighted:
        given |= {"D": None, "dt_bias": None}
    ours = states_of(given)
    expected = ours.clone()
    out = state_space_scan(**given, state=ours, step=drawn.step)
    close(out, state_space_scan_reference(**given, state=expected, step=drawn.step), 2e-5)
    close(ours, expected, 2e-5)


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"])
def test_the_loop_scans_as_transformers_do(name):
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    heads, rows, columns, groups, count = 4, 16, 32, 2, 150
    given = tokens_of(count, heads, rows, groups, columns, torch.float32, torch.device("cpu"))
    given["dt_limit"] = (0.01, 0.5)
    state = states_of(given)
    theirs = {key: each[None] for key, each in given.items() if key in ("B", "C", "dt")}
    weights = {key: given[key] for key in ("A", "D", "dt_bias", "dt_limit")}
    expected, last = module.mamba2_chunk_scan(
        given["x"][None], chunk_size=32, dt_softplus=True, initial_states=state[:1].clone(),
        return_final_states=True, **theirs, **weights,
    )  # fmt: skip
    step = in_turn([], [(CHUNK, 0, -1), (CHUNK, CARRIED, -1), (22, CARRIED, 1)], torch.device("cpu")).step
    out = state_space_scan_reference(**given, state=state, step=step)
    close(out, expected[0], 1e-5)
    close(state[1], last[0], 1e-5)


def test_decodes_scan_as_chunks_do(device):
    """One token at a time, or all of them at once."""
    chunks = in_turn([], [(CHUNK, NO_STATE, -1), (9, CARRIED, 0)], device)
    given = tokens_of(chunks.tokens, 2, 16, 1, 16, torch.float32, device)
    state = states_of(given)
    out = state_space_scan(**given, state=state, step=chunks.step)
    for token in range(chunks.tokens):
        step = in_turn([(1 if token else NO_STATE, 1)], [], device).step
        own = {key: each[token : token + 1] for key, each in given.items() if key in ("x", "dt", "B", "C")}
        close(state_space_scan(**given | own, state=state, step=step)[0], out[token], 2e-5)
    close(state[1], state[0], 2e-5)


@pytest.mark.parametrize("columns", [16, 136])
@pytest.mark.parametrize("held", [torch.float16, torch.float32])
def test_where_a_step_ends_changes_no_bit(held, columns, device):
    """Chunks of one sequence, carried in one step or each in a step of its own from block to block."""
    whole = in_turn([], [(CHUNK, NO_STATE, -1), (CHUNK, CARRIED, -1), (30, CARRIED, 0)], device)
    given = tokens_of(whole.tokens, 2, 16, 1, columns, torch.float32, device)
    state = states_of(given, held)
    out = state_space_scan(**given, state=state, step=whole.step)
    for begin in range(0, whole.tokens, CHUNK):
        size = min(CHUNK, whole.tokens - begin)
        step = in_turn([], [(size, 1 if begin else NO_STATE, 1)], device).step
        own = {key: given[key][begin : begin + size] for key in ("x", "dt", "B", "C")}
        assert torch.equal(state_space_scan(**given | own, state=state, step=step), out[begin : begin + size])
    assert torch.equal(state[0], state[1])


def test_many_chunks(device):
    """More than are looked through at once for the next that goes on from a block."""
    chunks = [(1, NO_STATE, 0), *[(1, CARRIED, -1)] * 130, (2, 0, 1), *[(1, CARRIED, -1)] * 3, (1, 1, 2)]
    drawn = in_turn([], chunks, device)
    given = tokens_of(drawn.tokens, 1, 16, 1, 16, torch.float32, device)
    ours = states_of(given)
    expected = ours.clone()
    out = state_space_scan(**given, state=ours, step=drawn.step)
    close(out, state_space_scan_reference(**given, state=expected, step=drawn.step), 5e-5)
    close(ours, expected, 5e-5)


def test_nothing_but_padding_writes_nothing(device):
    step = in_turn([], [(0, 0, 1), (0, NO_STATE, 2), (0, CARRIED, 3)], device).step
    given = tokens_of(0, 2, 16, 1, 16, torch.float32, device)
    state = states_of(given)
    ours = state.clone()
    state_space_scan(**given, state=ours, step=step)
    assert torch.equal(ours, state)


def test_states_may_be_held_in_16_bits(device):
    drawn = draw_step(device)
    given = tokens_of(drawn.tokens, 2, 16, 1, 16, torch.float32, device)
    ours = states_of(given, torch.float16)
    expected = ours.clone()
    out = state_space_scan(**given, state=ours, step=drawn.step)
    theirs = state_space_scan_reference(**given, state=expected, step=drawn.step)
    close(out[drawn.owned], theirs[drawn.owned], 2e-3)
    close(ours, expected, 2e-3)


def test_blocks_may_lie_apart(device):
    drawn = draw_step(device)
    given = tokens_of(drawn.tokens, 2, 16, 1, 16, torch.float32, device)
    apart = torch.randn(BLOCKS, 3, 2, 16, 16, device=device)
    others = apart[:, [0, 2]].clone()
    expected = apart[:, 1].clone()
    out = state_space_scan(**given, state=apart[:, 1], step=drawn.step)
    theirs = state_space_scan_reference(**given, state=expected, step=drawn.step)
    close(out[drawn.owned], theirs[drawn.owned], 2e-5)
    close(apart[:, 1], expected, 2e-5)
    assert torch.equal(apart[:, [0, 2]], others)


def test_no_tokens(device):
    step = in_turn([], [], device).step
    given = tokens_of(0, 2, 16, 1, 16, torch.float32, device)
    state = states_of(given)
    assert state_space_scan(**given, state=state.clone(), step=step).shape == (0, 2, 16)


def test_what_does_not_fit_is_refused(device):
    step = in_turn([(0, 0)], [], device).step
    given = tokens_of(1, 2, 16, 1, 16, torch.float32, device)
    state = states_of(given)
    with pytest.raises(ValueError, match=r"expected \[T, H, P\]"):
        state_space_scan(**given, state=state[:, :1], step=step)
    with pytest.raises(ValueError, match="expected one dtype"):
        state_space_scan(**given | {"B": given["B"].half()}, state=state, step=step)
    with pytest.raises(ValueError, match="expected them contiguous"):
        state_space_scan(**given, state=state.transpose(2, 3), step=step)
    wide = tokens_of(1, 1, 8, 1, 257, torch.float32, device)
    with pytest.raises(ValueError, match="up to"):
        state_space_scan(**wide, state=states_of(wide), step=step)


def test_heads_are_sliced_while_all_programs_run_at_once():
    assert chunk_tile(128, 64, 128)["TILE_ROWS"] == 32
    assert chunk_tile(80, 64, 128)["TILE_ROWS"] == 32
    assert chunk_tile(256, 64, 128)["TILE_ROWS"] == 64
    assert chunk_tile(8, 64, 128)["TILE_ROWS"] == NARROWEST_SLICE


@pytest.mark.parametrize(
    ("columns", "width", "parts"), [(16, 16, 1), (100, 128, 1), (128, 128, 1), (136, 64, 3), (256, 64, 4)]
)
def test_states_of_many_columns_are_in_parts(columns, width, parts):
    tile = chunk_tile(48, 64, columns)
    assert (tile["TILE_COLUMNS"], tile["PARTS"]) == (width, parts)
