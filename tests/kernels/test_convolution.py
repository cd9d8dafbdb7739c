"""Short convolutions: transformers' are the measure of the loop over tokens, and that is the kernels'."""

import itertools

import pytest
import torch
from paged import TOLERANCE, with_dtypes
from state_steps import BLOCKS, draw_step, step_of

from quire.kernels.recurrence import convolution
from quire.kernels.recurrence.convolution import CHUNK_CHANNELS, convolve, convolve_reference
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE

CPU = torch.device("cpu")
FUNCTIONS = [convolve, convolve_reference]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def layer(tokens, channels, inputs, kept, dtype, device):
    """Return tokens as a projection has them, a view of wider ones, a weight, a bias, and states."""
    x = torch.randn(tokens, channels + 8, device=device).to(dtype)[:, 8:]
    weight, bias = torch.randn(channels, inputs, device=device), torch.randn(channels, device=device)
    states = torch.randn(BLOCKS, channels, kept, device=device)
    return x, weight.to(dtype), bias.to(dtype), states.to(dtype)


# Inputs of a sum and those that are kept, and channels: some of a slice, and those of more than one.
SIZES = [(4, 4), (4, 3), (3, 3), (2, 2), (2, 4), (3, 6)]
CHANNELS = [24, CHUNK_CHANNELS + 72]


@pytest.mark.parametrize(
    ("sizes", "channels", "biased", "silu", "dtype"),
    with_dtypes(
        (sizes, channels, which % 2 == 0, which % 3 != 0)
        for which, (sizes, channels) in enumerate(itertools.product(SIZES, CHANNELS))
    ),
)
def test_kernels_convolve_as_the_loop_does(sizes, channels, biased, silu, device, dtype):
    drawn = draw_step(device)
    x, weight, bias, states = layer(drawn.tokens, channels, *sizes, dtype, device)
    around = torch.cat([states[-1:], states])  # with a block ahead of the first
    ours, expected, bias = around[1:], states.clone(), bias if biased else None
    out = convolve(x, weight, bias, silu, ours, drawn.step)
    theirs = convolve_reference(x, weight, bias, silu, expected, drawn.step)
    assert out.dtype == dtype
    own, tolerance = drawn.owned, TOLERANCE[dtype]
    torch.testing.assert_close(out[own], theirs[own], rtol=tolerance, atol=tolerance)
    assert not out[drawn.padding].any() and not theirs[drawn.padding].any()
    assert torch.equal(ours, expected)  # inputs as they are
    assert torch.equal(ours[drawn.others], states[drawn.others]) and torch.equal(around[0], states[-1])


# In the interpreter both types come to both functions, with strides of either kind.
@pytest.mark.parametrize(
    ("sizes", "function", "apart", "dtype"),
    with_dtypes(
        (sizes, function, (which + even) % 2 == 0)
        for which, sizes in enumerate(SIZES)
        for function in FUNCTIONS
        for even in (0, 1)
    ),
)
def test_factors_are_those_of_inputs_and_of_outputs(sizes, function, apart, device, dtype):
    """Parts of one product, or each with strides of its own; rounded as if multiplied beside."""
    drawn, channels = draw_step(device), 24
    x, weight, bias, states = layer(drawn.tokens, channels, *sizes, dtype, device)
    wide = torch.randn(drawn.tokens, 3 * channels, device=device).to(dtype)
    before, behind, inputs = wide.chunk(3, dim=1)
    inputs = x if apart else inputs
    ours, expected = states.clone(), states.clone()
    out = function(inputs, weight, bias, False, ours, drawn.step, (before, behind))
    theirs = function(before * inputs, weight, bias, False, expected, drawn.step) * behind
    assert torch.equal(out[drawn.owned], theirs[drawn.owned]) and torch.equal(ours, expected)
    assert not out[drawn.padding].any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_factors_that_do_not_fit_are_refused(function, device):
    x, weight, bias, states = layer(5, 24, 4, 4, torch.float32, device)
    step = step_of([(5, 6)], [], device)
    for factor in (x[1:], x.half()):
        with pytest.raises(ValueError, match=r"factors .*: expected two as x is"):
            function(x, weight, bias, False, states, step, (x, factor))


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize(("biased", "activation"), [(True, "silu"), (False, None)])
def test_the_loop_convolves_as_transformers_do(name, biased, activation):
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    count, inputs = CHUNK + 30, 4
    x, weight, bias, states = layer(count, 24, inputs, inputs, torch.float32, CPU)
    bias = bias if biased else None
    expected = module.causal_conv1d_fn(x.T[None], weight, bias, activation=activation)[0].T
    chunks = [(0, CHUNK, NO_STATE, -1), (CHUNK, 29, CARRIED, 5)]
    out = convolve_reference(x[:-1], weight, bias, activation is not None, states, step_of([], chunks, CPU))
    torch.testing.assert_close(out, expected[:-1], rtol=1e-5, atol=1e-5)
    kept = states[5].clone()[None]
    newest = module.causal_conv1d_update(x[-1:].T[None], kept, weight, bias, activation)[0].T
    out = convolve_reference(x[-1:], weight, bias, activation is not None, states, step_of([(5, 6)], [], CPU))
    torch.testing.assert_close(out, newest, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected[-1:], rtol=1e-5, atol=1e-5)
    assert torch.equal(states[6], kept[0]) and torch.equal(states[6], x[-inputs:].T)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_how_tokens_come_changes_no_bit(function, device, dtype):
    """One by one, a few at a time, or all in a step: a sequence's outputs and state are the same."""
    count = CHUNK + 20
    x, weight, bias, states = layer(count, 24, 4, 4, dtype, device)
    whole = step_of([], [(0, CHUNK, NO_STATE, -1), (CHUNK, 20, CARRIED, 0)], device)
    expected = function(x, weight, bias, True, states, whole)
    sizes, at = itertools.cycle([1, 2, 3, 7, 40]), 0
    while at < count:
        size = min(next(sizes), count - at)
        before = 1 if at else NO_STATE
        if size == 1:
            step = step_of([(before, 1)], [], device)
        else:
            step = step_of([], [(0, size, before, 1)], device)
        own = function(x[at : at + size], weight, bias, True, states, step)
        assert torch.equal(own, expected[at : at + size])
        at += size
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_blocks_may_lie_apart_and_channels_too(function, device):
    drawn = draw_step(device, 8)
    x, weight, bias, states = layer(drawn.tokens, 24, 4, 4, torch.float32, device)
    apart = torch.stack([states] * 3, 1)
    expected = function(x, weight, bias, True, states, drawn.step)
    transposed = x.T.contiguous().T
    out = function(transposed, weight, bias, True, apart[:, 1], drawn.step)
    assert torch.equal(out[drawn.owned], expected[drawn.owned])
    assert torch.equal(apart[:, 1], states) and torch.equal(apart[:, 0], apart[:, 2])


def test_decodes_read_a_copy_of_the_weight_only_when_it_is_there(monkeypatch):
    """What a weight is copied by just ahead may not have ended when a dependent launch begins."""
    x, weight, bias, states = layer(1, 24, 4, 4, torch.float32, CPU)
    dependent = []

    def launch(*args, DEPENDENT, launch_pdl=False, **sizes):
        dependent.append((DEPENDENT, launch_pdl))

    monkeypatch.setattr(convolution, "decode_kernel", {(1, 1): launch})
    launched = {"DEPENDENT": True, "launch_pdl": True}
    monkeypatch.setattr(convolution, "dependent_launch", lambda device: launched)
    for each in (weight, weight.T.contiguous().T):
        convolve(x, each, bias, True, states, step_of([(0, 1)], [], CPU))
    assert dependent == [(True, True), (False, False)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tokens(function, device):
    x, weight, bias, states = layer(0, 24, 4, 4, torch.float32, device)
    assert function(x, weight, bias, True, states, step_of([], [], device)).shape == (0, 24)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_does_not_fit_is_refused(function, device):
    x, weight, bias, states = layer(1, 24, 4, 3, torch.float32, device)
    step = step_of([(0, 0)], [], device)
    with pytest.raises(ValueError, match=r"expected \[T, C\]"):
        function(x[:, 1:], weight, bias, True, states, step)
    with pytest.raises(ValueError, match="K - 1"):
        function(x, weight, bias, True, states[:, :, 1:], step)
    with pytest.raises(ValueError, match=r"expected \[24\]"):
        function(x, weight, bias[1:], True, states, step)
    with pytest.raises(ValueError, match="expected one dtype"):
        function(x, weight, bias, True, states.half(), step)
    with pytest.raises(ValueError, match="expected them contiguous"):
        function(x, weight, bias, True, states.transpose(1, 2).contiguous().transpose(1, 2), step)
