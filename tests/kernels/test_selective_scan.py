"""Mamba's scan: transformers' is the measure of the loop over tokens, and that is the kernels'."""

import itertools
from typing import Any

import pytest
import torch
from paged import with_dtypes
from state_steps import BLOCKS, DrawnStep, draw_step, step_of

from quire.kernels.recurrence.selective_scan import MOST_COLUMNS, selective_scan, selective_scan_reference
from quire.kernels.recurrence.selective_scan_kernels import SLICE, chunk_tile
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE

CPU = torch.device("cpu")
FUNCTIONS = [selective_scan, selective_scan_reference]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of how outputs are rounded


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def layer(
    tokens: int, channels: int, columns: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return tokens as projections have them, views of wider ones, and a layer's weights."""
    x, z, dt = torch.randn(tokens, 3 * channels + 8, device=device).to(dtype)[:, 8:].split(channels, 1)
    B, C = torch.randn(tokens, 2 * columns + 8, device=device).to(dtype)[:, 8:].split(columns, 1)
    return {
        "x": x,
        "dt": dt,
        "A": -4.0 * torch.rand(channels, columns, device=device),
        "B": B,
        "C": C,
        "D": torch.randn(channels, device=device),
        "z": z,
        "delta_bias": torch.randn(channels, device=device) - 2.0,
        "delta_softplus": True,
    }


def states_of(given: dict[str, Any]) -> torch.Tensor:
    return torch.randn(BLOCKS, *given["A"].shape, device=given["A"].device)


def of_tokens(given: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Return the same of some of the tokens."""
    return given | {name: given[name][begin:end] for name in ("x", "dt", "B", "C", "z")}


def close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Assert that two agree, by the size of what was added up."""
    size = 1.0 + float(expected.float().abs().max())
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * size)


def agree(given: dict[str, Any], drawn: DrawnStep, dtype: torch.dtype) -> None:
    """Assert that the kernels do as the loop does, and leave others' blocks as they are."""
    states = states_of(given)
    around = torch.cat([states[-1:], states])  # with a block ahead of the first
    ours, expected = around[1:], states.clone()
    out = selective_scan(**given, state=ours, step=drawn.step)
    theirs = selective_scan_reference(**given, state=expected, step=drawn.step)
    assert out.dtype == theirs.dtype == dtype
    own = drawn.owned
    close(out[own], theirs[own], TOLERANCE[dtype])
    assert not out[drawn.padding].any() and not theirs[drawn.padding].any()
    for block in drawn.written:
        close(ours[block], expected[block], 2e-5)
    assert torch.equal(ours[drawn.others], states[drawn.others]) and torch.equal(around[0], states[-1])


# Channels and columns: some of a slice, more than one, and what is padded.
SHAPES = [(20, 16), (SLICE + 16, 4), (16, 12), (16, 64)]


@pytest.mark.parametrize(("shape", "dtype"), with_dtypes(itertools.product(SHAPES)))
def test_kernels_scan_as_the_loop_does(shape, dtype, device):
    drawn = draw_step(device, 20)
    agree(layer(drawn.tokens, *shape, dtype, device), drawn, dtype)


@pytest.mark.parametrize("without", ["D", "z", "delta_bias", "delta_softplus"])
def test_what_may_be_missing(without, device):
    drawn = draw_step(device, 9)
    given = layer(drawn.tokens, 16, 16, torch.float32, device)
    given["dt"] = given["dt"] * 12.0  # some beyond 20, where softplus is its argument, and some close to 0
    if without == "delta_softplus":
        given |= {"delta_softplus": False, "dt": given["dt"].abs() / 12.0, "delta_bias": None}
    else:
        given[without] = None
    agree(given, drawn, torch.float32)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
def test_the_loop_scans_as_transformers_do(name):
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    count = CHUNK + 30
    given = layer(count, 24, 16, torch.float32, CPU)
    states = states_of(given)
    theirs = {key: given[key].T[None] for key in ("dt", "B", "C", "z")}
    weights = {key: given[key] for key in ("A", "D", "delta_bias", "delta_softplus")}
    expected, last = module.mamba_selective_scan(
        given["x"].T[None], **theirs, **weights, return_last_state=True
    )
    step = step_of([], [(0, CHUNK, NO_STATE, -1), (CHUNK, 29, CARRIED, 5)], CPU)
    out = selective_scan_reference(**of_tokens(given, 0, count - 1), state=states, step=step)
    close(out, expected[0].T[:-1], 1e-5)
    newest = selective_scan_reference(
        **of_tokens(given, count - 1, count), state=states, step=step_of([(5, 6)], [], CPU)
    )
    close(newest, expected[0].T[-1:], 1e-5)
    close(states[6], last[0], 1e-5)


def test_where_a_step_ends_changes_no_bit(device):
    """Chunks of one sequence, carried in one step or each in a step of its own from block to block."""
    sizes = [24, 5, 16]
    given = layer(sum(sizes), 16, 16, torch.float16, device)
    states = states_of(given)
    chunks = [(0, 24, NO_STATE, -1), (24, 5, CARRIED, -1), (29, 16, CARRIED, 0)]
    out = selective_scan(**given, state=states, step=step_of([], chunks, device))
    for at, size, *_ in chunks:
        step = step_of([], [(0, size, 1 if at else NO_STATE, 1)], device)
        own = selective_scan(**of_tokens(given, at, at + size), state=states, step=step)
        assert torch.equal(own, out[at : at + size])
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_decodes_scan_as_chunks_do(function, device):
    """One token at a time, or all of them at once."""
    given = layer(21, 16, 16, torch.float32, device)
    states = states_of(given)
    out = function(**given, state=states, step=step_of([], [(0, 21, NO_STATE, 0)], device))
    for token in range(21):
        step = step_of([(1 if token else NO_STATE, 1)], [], device)
        close(
            function(**of_tokens(given, token, token + 1), state=states, step=step),
            out[token : token + 1],
            2e-6,
        )
    close(states[1], states[0], 2e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_blocks_may_lie_apart_and_channels_too(function, device):
    drawn = draw_step(device, 5)
    given = layer(drawn.tokens, 16, 16, torch.float32, device)
    states = states_of(given)
    apart = torch.stack([states] * 3, 1)
    expected = function(**given, state=states, step=drawn.step)
    transposed = {name: given[name].T.contiguous().T for name in ("x", "dt", "B", "C", "z")}
    out = function(**given | transposed, state=apart[:, 1], step=drawn.step)
    assert torch.equal(out[drawn.owned], expected[drawn.owned])
    assert torch.equal(apart[:, 1], states) and torch.equal(apart[:, 0], apart[:, 2])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tokens(function, device):
    given = layer(0, 16, 16, torch.float32, device)
    assert function(**given, state=states_of(given), step=step_of([], [], device)).shape == (0, 16)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_does_not_fit_is_refused(function, device):
    given, step = layer(1, 16, 16, torch.float32, device), step_of([(0, 0)], [], device)
    states = states_of(given)
    for other in ({"dt": given["dt"][:, 1:]}, {"B": given["B"][:, 1:]}, {"A": given["A"][1:]}):
        with pytest.raises(ValueError, match=r"expected \[T, E\]"):
            function(**given | other, state=states, step=step)
    with pytest.raises(ValueError, match=r"D \(15,\): expected \[16\]"):
        function(**given | {"D": given["D"][1:]}, state=states, step=step)
    with pytest.raises(ValueError, match="expected float32"):
        function(**given, state=states.half(), step=step)
    with pytest.raises(ValueError, match="expected them contiguous"):
        function(**given, state=states.transpose(1, 2).contiguous().transpose(1, 2), step=step)
    wide = layer(1, 2, MOST_COLUMNS + 1, torch.float32, device)
    with pytest.raises(ValueError, match="up to"):
        function(**wide, state=states_of(wide), step=step)


def test_of_wide_states_fewer_tokens_are_taken_together():
    assert [chunk_tile(columns)["TOGETHER"] for columns in (4, 16, 64, 100, 256)] == [16, 16, 4, 2, 1]
