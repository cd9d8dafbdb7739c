"""Experts by weights in few bits against fp64: by kernels on a GPU, elsewhere by torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import HAS_GPU
from test_quantised_weight import draw_numbers, weight_of

from quire.kernels.experts.experts import experts_reference
from quire.kernels.experts.quantised import QuantisedExperts, expand_experts, takes
from quire.kernels.experts.quantised_experts import quantised_experts
from quire.kernels.experts.quantised_few import few_quantised_experts, tiled_quantised_experts
from quire.kernels.experts.quantised_stream import streamed_quantised_experts, suits
from quire.kernels.gpu import gpu_of
from quire.kernels.quantised.weight import Numbers, WeightFormat

FORMATS = {
    "fours": WeightFormat("float4", 32, False, torch.uint8),
    "float8_blocks": WeightFormat("float8", 128, False, torch.bfloat16),
    "float8_rows": WeightFormat("float8", 0, False, torch.float32),
    "int4": WeightFormat("int4", 128, True, torch.float16),
    "int4_small_groups": WeightFormat("int4", 64, False, torch.bfloat16),
    "int4_rows": WeightFormat("int4", 0, False, torch.float32),
}
# Of tokens alone; tiles of 8 to 128, whole and ragged. (tokens, experts, top)
STEPS = [(1, 8, 2), (7, 8, 3), (60, 8, 2), (100, 5, 2), (300, 3, 2)]
if HAS_GPU:  # elsewhere one way takes them all, expert by expert, and what takes long is to draw so many
    STEPS += [(3, 64, 2), (700, 128, 1), (40, 300, 8)]
DTYPES = (torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32,)
CASES = [(name, dtype) for name in FORMATS for dtype in DTYPES if not HAS_GPU or takes(FORMATS[name], dtype)]
OF_FOURS_DTYPE = DTYPES[0]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest
# As gpt-oss has them, in small: no whole lines.
OF_FOURS = {"hidden": 416, "inner": 288}
OTHERS = {"hidden": 384, "inner": 256}
ACTIVATIONS = {"silu": {}, "clamped": {"alpha": 1.702, "limit": 0.5}, "gelu": {}}


def drawn(form, count, hidden, inner, device, *, biased=False, **activation) -> QuantisedExperts:
    def weight(outputs, inputs):
        return weight_of(form, draw_numbers(form, count * outputs, inputs, device))

    biases = (torch.randn(count, 2 * inner, device=device), torch.randn(count, hidden, device=device))
    return QuantisedExperts(
        weight(2 * inner, hidden), weight(hidden, inner), count, *(biases if biased else ()), **activation
    )


def in_dtype(experts, dtype):
    biases = {name: getattr(experts, name) for name in ("gate_up_bias", "down_bias")}
    return replace(experts, **{name: each.to(dtype) for name, each in biases.items() if each is not None})


def asked(tokens, experts, top, device, dtype):
    index = torch.stack([torch.randperm(experts.count, device=device)[:top] for _ in range(tokens)])
    x = torch.randn(tokens, experts.hidden, device=device).to(dtype)
    return x, index, torch.rand(tokens, top, device=device).to(dtype)


def ways_of(experts, dtype):
    if not HAS_GPU:
        return [quantised_experts]
    ways = [few_quantised_experts, tiled_quantised_experts, quantised_experts]
    streams = suits(experts, gpu_of(experts.down.device), dtype)
    return [*ways, streamed_quantised_experts] if streams else ways


def assert_near(result, x, index, weights, experts):
    expected = experts_reference(x.double(), index, weights.double(), expand_experts(experts, torch.float64))
    error = (result.double() - expected).abs().max() / expected.abs().max()
    assert float(error) < TOLERANCE[result.dtype]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: "x".join(map(str, step)))
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_products(name, dtype, step, device):
    torch.manual_seed(0)
    tokens, count, top = step
    experts = drawn(FORMATS[name], count, **(OF_FOURS if name == "fours" else OTHERS), device=device)
    x, index, weights = asked(tokens, experts, top, device, dtype)
    for way in ways_of(experts, dtype):
        assert_near(way(x, index, weights, experts), x, index, weights, experts)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 50])
def test_activations_and_biases(activation, tokens, device):
    torch.manual_seed(0)
    found = drawn(
        FORMATS["fours"], 4, **OF_FOURS, device=device, biased=True, activation=activation,
        **ACTIVATIONS[activation],
    )  # fmt: skip
    experts = in_dtype(found, OF_FOURS_DTYPE)
    x, index, weights = asked(tokens, experts, 2, device, OF_FOURS_DTYPE)
    for way in ways_of(experts, OF_FOURS_DTYPE):
        assert_near(way(x, index, weights, experts), x, index, weights, experts)


def test_a_token_does_not_depend_on_others(device):
    torch.manual_seed(0)
    experts = drawn(FORMATS["fours"], 4, **OF_FOURS, device=device)
    x, index, weights = asked(40, experts, 2, device, OF_FOURS_DTYPE)
    order = torch.randperm(40, device=device)
    for way in ways_of(experts, OF_FOURS_DTYPE):
        result = way(x, index, weights, experts)
        assert torch.equal(way(x[order], index[order], weights[order], experts), result[order])


def test_all_tokens_may_ask_the_same_experts(device):
    torch.manual_seed(0)
    experts = drawn(FORMATS["fours"], 16, **OF_FOURS, device=device)
    x, _, weights = asked(150, experts, 2, device, OF_FOURS_DTYPE)
    index = torch.tensor([13, 2], device=device).expand(150, 2).contiguous()
    for way in ways_of(experts, OF_FOURS_DTYPE):
        assert_near(way(x, index, weights, experts), x, index, weights, experts)


def test_no_tokens(device):
    experts = drawn(FORMATS["fours"], 4, **OF_FOURS, device=device)
    x, index, weights = asked(1, experts, 2, device, OF_FOURS_DTYPE)
    assert quantised_experts(x[:0], index[:0], weights[:0], experts).shape == (0, experts.hidden)


def test_a_token_may_ask_an_expert_twice_with_shares_in_fp32(device):
    torch.manual_seed(0)
    experts = drawn(FORMATS["fours"], 4, **OF_FOURS, device=device)
    x, _, weights = asked(12, experts, 3, device, OF_FOURS_DTYPE)
    index = torch.tensor([2, 0, 2], dtype=torch.int32, device=device).expand(12, 3).contiguous()
    for way in ways_of(experts, OF_FOURS_DTYPE):
        result = way(x, index, weights.float(), experts)
        assert_near(result, x, index.long(), weights, experts)


def test_tokens_may_stand_in_a_larger_memory(device):
    torch.manual_seed(0)
    experts = drawn(FORMATS["fours"], 4, **OF_FOURS, device=device)
    x, index, weights = asked(30, experts, 2, device, OF_FOURS_DTYPE)
    wide = torch.full((30, experts.hidden + 8), float("nan"), dtype=x.dtype, device=device)
    wide[:, : experts.hidden] = x
    result = quantised_experts(wide[:, : experts.hidden], index, weights, experts)
    assert torch.equal(result, quantised_experts(x, index, weights, experts))


@pytest.mark.parametrize("exponent", [8, 64, 120, 128])
def test_each_code_with_any_scale(exponent, device):
    """Weights of up are looked at one by one: gate's gelu of a large number is that number."""
    form, inputs = FORMATS["fours"], 64
    codes = torch.arange(16, device=device).repeat(inputs, 4).to(torch.uint8)
    scales = torch.full((inputs, 2), exponent, dtype=torch.uint8, device=device)
    eye = torch.where(torch.eye(inputs, device=device) > 0, 2, 0).to(torch.uint8)
    ones = torch.full((inputs, 2), 127, dtype=torch.uint8, device=device)
    gate_up = Numbers(torch.cat((torch.full_like(codes, 2), codes)), torch.cat((ones, scales)))
    experts = QuantisedExperts(
        weight_of(form, gate_up), weight_of(form, Numbers(eye, ones)), 1, activation="gelu"
    )
    x = torch.zeros(inputs, inputs, device=device, dtype=torch.bfloat16).fill_diagonal_(8.0)
    index = torch.zeros(inputs, 1, dtype=torch.int64, device=device)
    expected = 64 * expand_experts(experts, torch.float64).gate_up[0, inputs:].T
    for way in ways_of(experts, torch.bfloat16):
        result = way(x, index, torch.ones(inputs, 1, device=device, dtype=x.dtype), experts)
        assert torch.equal(result.double(), expected)
