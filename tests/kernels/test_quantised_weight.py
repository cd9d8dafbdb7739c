"""Weights in few bits: what is put in comes out, and stands for its products with scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.quantised.linear import QuantisedLinear
from quire.kernels.quantised.weight import (
    Numbers,
    QuantisedWeight,
    WeightFormat,
    expand_reference,
    quantise,
)

CPU = torch.device("cpu")
FORMATS = st.builds(
    WeightFormat,
    st.sampled_from(("float8", "int4")),
    st.sampled_from((0, 64, 128)),
    st.booleans(),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
).filter(lambda form: form.codes == "int4" or not form.zero_points)


def draw_numbers(form: WeightFormat, outputs: int, inputs: int, device: torch.device = CPU) -> Numbers:
    """Return every code that there is, at random places, with scales and zero points at random."""
    groups = form.groups_of(inputs)
    most = 448 if form.codes == "float8" else 8  # of a code: numbers are up to one
    scales = ((torch.rand(outputs, groups, device=device) + 0.25) / most).to(form.scales)
    if form.codes == "float4":
        codes = torch.randint(0, 16, (outputs, inputs), device=device).to(torch.uint8)
        return Numbers(codes, torch.randint(118, 125, (outputs, groups), device=device).to(torch.uint8))
    if form.codes == "float8":
        codes = torch.randint(0, 127, (outputs, inputs), device=device)  # 127 is NaN
        codes += 128 * torch.randint(0, 2, codes.shape, device=device)
        return Numbers(codes.to(torch.uint8).view(torch.float8_e4m3fn), scales)
    codes = torch.randint(0, 16, (outputs, inputs), device=device).to(torch.uint8)
    zeros = torch.randint(0, 16, (outputs, groups), device=device).to(torch.uint8)
    return Numbers(codes, scales, zeros if form.zero_points else None)


def weight_of(form: WeightFormat, numbers: Numbers) -> QuantisedWeight:
    weight = QuantisedWeight.empty(form, *numbers.codes.shape, numbers.codes.device)
    weight.fill(numbers)
    return weight


@given(FORMATS, st.integers(1, 5), st.integers(1, 4))
def test_what_is_put_in_comes_out(form, outputs, lines):
    numbers = draw_numbers(form, outputs, 128 * lines)
    found = weight_of(form, numbers).numbers()
    assert torch.equal(found.codes.view(torch.uint8), numbers.codes.view(torch.uint8))
    assert torch.equal(found.scales, numbers.scales)
    if form.zero_points:
        assert torch.equal(found.zeros, numbers.zeros)


@given(FORMATS)
def test_rows_are_a_view(form):
    whole = QuantisedWeight.empty(form, 6, 256, CPU)
    first, second = draw_numbers(form, 2, 256), draw_numbers(form, 4, 256)
    whole.rows(0, 2).fill(first)
    whole.rows(2, 6).fill(second)
    parts = [expand_reference(weight_of(form, part), torch.float32) for part in (first, second)]
    assert torch.equal(expand_reference(whole, torch.float32), torch.cat(parts))
    assert whole.nbytes == sum(
        part.nbytes for part in (whole.codes, whole.scales, whole.zeros) if part is not None
    )


def test_a_number_is_its_code_less_the_zero_point_times_the_scale():
    form = WeightFormat("int4", 64, True, torch.float32)
    codes = torch.arange(128).remainder(16).to(torch.uint8)[None]
    weight = weight_of(form, Numbers(codes, torch.tensor([[0.5, 2.0]]), torch.tensor([[3, 8]]).byte()))
    expected = torch.cat(((codes[0, :64].float() - 3) * 0.5, (codes[0, 64:].float() - 8) * 2))
    assert torch.equal(expand_reference(weight, torch.float32)[0], expected)


def test_each_8_bit_float_is_the_number_that_torch_has_it_for():
    form = WeightFormat("float8", 0, False, torch.float32)
    floats = torch.arange(256).byte().view(torch.float8_e4m3fn)[None]
    found = expand_reference(weight_of(form, Numbers(floats, torch.tensor([[0.5]]))), torch.float32)
    torch.testing.assert_close(found, floats.float() * 0.5, atol=0, rtol=0, equal_nan=True)
    assert int(found.isnan().sum()) == 2


@given(FORMATS)
def test_a_weight_without_outputs_has_no_numbers(form):
    """As a layer has whose product has another's rows."""
    weight = QuantisedWeight.empty(form, 0, 256, CPU)
    assert expand_reference(weight, torch.float16).shape == weight.numbers().codes.shape == (0, 256)


@given(FORMATS)
def test_rounded_numbers_are_near(form):
    torch.manual_seed(0)
    numbers = torch.randn(16, 256) * 0.02
    expanded = expand_reference(weight_of(form, quantise(numbers, form)), torch.float32)
    error = (expanded - numbers).norm() / numbers.norm()
    assert error < (0.04 if form.codes == "float8" else 0.15)


def test_numbers_of_a_format_stay_what_they_are():
    for form in (
        WeightFormat("float8", 128, False, torch.float32),
        WeightFormat("int4", 0, True, torch.float32),
    ):
        torch.manual_seed(0)
        once = expand_reference(weight_of(form, quantise(torch.randn(8, 256), form)), torch.float32)
        twice = expand_reference(weight_of(form, quantise(once, form)), torch.float32)
        torch.testing.assert_close(twice, once)


FOURS = WeightFormat("float4", 32, False, torch.uint8)


@given(st.integers(1, 5), st.integers(1, 12))
def test_fours_come_out_whose_last_line_is_not_whole(outputs, groups):
    numbers = draw_numbers(FOURS, outputs, 32 * groups)
    weight = weight_of(FOURS, numbers)
    assert torch.equal(weight.numbers().codes, numbers.codes)
    assert torch.equal(weight.numbers().scales, numbers.scales)
    assert weight.shape == (outputs, 32 * groups)
    assert weight.nbytes == weight.codes.nbytes + weight.scales.nbytes


def test_a_four_is_one_of_eight_numbers_times_a_power_of_two():
    codes = torch.arange(16).repeat(4).to(torch.uint8)[None]
    expanded = expand_reference(
        weight_of(FOURS, Numbers(codes, torch.tensor([[127, 124]]).byte())), torch.float32
    )
    fours = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    assert torch.equal(expanded[0, :16], torch.cat((fours, -fours)))
    assert torch.equal(expanded[0, 32:], expanded[0, :32] / 8)


def test_numbers_are_rounded_to_the_nearest_four():
    numbers = torch.tensor((6.0, -2.6, 0.3, 0.2, 0.0, 1.3)).repeat(16)[None, :96]
    rounded = expand_reference(weight_of(FOURS, quantise(numbers, FOURS)), torch.float32)
    assert rounded[0, :6].tolist() == [6.0, -3.0, 0.5, 0.0, 0.0, 1.5]
    once = weight_of(FOURS, quantise(rounded, FOURS))
    assert torch.equal(expand_reference(once, torch.float32), rounded)


def test_scales_that_kernels_do_not_have_are_refused():
    numbers = Numbers(torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[129]]).byte())
    with pytest.raises(ValueError, match=r"has a scale of 2\^2; expected 2\^1 at most .* expand"):
        weight_of(FOURS, numbers)


def test_scales_are_not_looked_at_where_the_largest_is_known():
    """A host would wait for the device: of one without numbers it would never have any."""
    drawn = quantise(torch.empty(4, 256, device="meta"), FOURS)
    QuantisedWeight.empty(FOURS, 4, 256, torch.device("meta")).fill(drawn)
    with pytest.raises(ValueError, match=r"has a scale of 2\^2; expected 2\^1 at most"):
        QuantisedWeight.empty(FOURS, 4, 256, torch.device("meta")).fill(replace(drawn, most_exponent=129))


def test_inputs_that_do_not_fit_are_refused():
    for form, inputs in (
        (WeightFormat("int4", 128, False, torch.float16), 192),
        (WeightFormat("int4", 32, False, torch.float16), 256),
        (WeightFormat("float8", 384, False, torch.float16), 512),
        (WeightFormat("int4", 192, False, torch.float16), 768),  # a line's first half would end a group
    ):
        assert not form.takes(inputs)
        with pytest.raises(ValueError, match=f"{inputs} inputs cannot be kept in groups of {form.group}"):
            QuantisedWeight.empty(form, 16, inputs, CPU)


def test_a_layer_multiplies_by_what_its_weight_stands_for(device):
    form = WeightFormat("int4", 128, True, torch.float16)
    weight = weight_of(form, draw_numbers(form, 32, 256, device))
    x, bias = torch.randn(3, 256, device=device), torch.randn(32, device=device)
    if device.type == "cuda":
        x, bias = x.bfloat16(), bias.bfloat16()
    layer = QuantisedLinear(weight, bias)
    expected = torch.nn.functional.linear(x, expand_reference(weight, x.dtype), bias)
    torch.testing.assert_close(layer(x), expected)
    matrix = layer.matrix
    assert (matrix.outputs, matrix.inputs, matrix.biased, matrix.format) == (32, 256, True, form)
