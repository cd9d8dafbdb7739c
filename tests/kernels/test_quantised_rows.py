"""Rows of weights in few bits, of several as one and in another order, stand for the same numbers."""

from __future__ import annotations

import pytest
import torch
from test_quantised_products import FORMATS
from test_quantised_weight import draw_numbers, weight_of

from quire.kernels.quantised.rows import alone, in_order, joined, padded
from quire.kernels.quantised.weight import QuantisedWeight, expand_reference

INPUTS = 384


@pytest.fixture(params=FORMATS)
def weights(request, device):
    torch.manual_seed(0)
    form = FORMATS[request.param]
    return [weight_of(form, draw_numbers(form, outputs, INPUTS, device)) for outputs in (48, 16)]


def numbers_of(weight: QuantisedWeight):
    return expand_reference(weight, torch.float32)


def test_weights_below_each_other(weights):
    both = joined(weights)
    assert torch.equal(numbers_of(both), torch.cat([numbers_of(each) for each in weights]))
    assert both.nbytes == sum(each.nbytes for each in weights)


def test_rows_in_another_order(weights):
    order = torch.randperm(48, device=weights[0].device)
    assert torch.equal(numbers_of(in_order(weights[0], order)), numbers_of(weights[0])[order])


def test_zeros_behind_rows(weights):
    numbers = numbers_of(padded(weights[0], 80))
    assert torch.equal(numbers[:48], numbers_of(weights[0])) and not numbers[48:].any()


def test_a_range_of_rows_alone(weights):
    rows = alone(weights[0].rows(16, 40))
    assert torch.equal(numbers_of(rows), numbers_of(weights[0])[16:40])
    assert rows.codes.is_contiguous() and rows.scales.is_contiguous()
    assert rows.zeros is None or rows.zeros.is_contiguous()


def test_weights_of_other_formats_are_no_weight_together(weights):
    other = FORMATS["float8_rows" if weights[0].format.codes == "int4" else "int4"]
    with pytest.raises(ValueError, match="several formats"):
        joined([weights[0], weight_of(other, draw_numbers(other, 16, INPUTS, weights[0].device))])
