"""Experts: a token's are sorted and multiplied as plain torch does it, whatever the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from paged import TOLERANCE

from quire.kernels.experts.experts import experts, experts_reference
from quire.kernels.experts.few import Pieces, few_experts
from quire.kernels.experts.grouped import EXACT, TILES, Tile, Tiles, grouped_experts, tiles_of
from quire.kernels.experts.groups import group
from quire.kernels.experts.weights import Experts
from quire.kernels.gpu import KNOWN

COUNT, TOP, HIDDEN, INNER = 5, 2, 40, 24
SMALL = Tiles(Tile(16, 16, 16, 1, 1, together=2), Tile(16, 16, 16, 1, 1))
# One has programs for each pair of a token and an expert; of the other, tokens fill more than a tile.
KINDS = pytest.mark.parametrize(("function", "tokens"), [(few_experts, 6), (grouped_experts, 24)])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def made(device, dtype, *, biased=False, columns=False, count=COUNT) -> Experts:
    """Random experts; `columns`: as gpt-oss has them."""

    def random(*shape):
        return (torch.randn(shape, device=device) / math.sqrt(shape[-1])).to(dtype)

    found = Experts(random(count, 2 * INNER, HIDDEN), random(count, HIDDEN, INNER))
    if biased:
        biases = {"gate_up_bias": random(count, 2 * INNER), "down_bias": random(count, HIDDEN)}
        found = replace(found, **biases, interleaved=True, activation="clamped", alpha=1.702, limit=0.5)
    return found


def asked(tokens, device, dtype, count=COUNT):
    index = torch.stack([torch.randperm(count)[:TOP] for _ in range(tokens)]).to(device)
    return torch.randn(tokens, HIDDEN, device=device).to(dtype), index, torch.rand(tokens, TOP, device=device)


@pytest.mark.parametrize("biased", [False, True])
@KINDS
def test_kernels_equal_the_reference(function, tokens, biased, device, dtype):
    found = made(device, dtype, biased=biased)
    x, index, weights = asked(tokens - 1, device, dtype)
    options = {"tiles": SMALL} if function is grouped_experts else {}
    result = function(x, index, weights, found, **options)
    expected = experts_reference(x.double(), index, weights.double(), doubled(found)).to(dtype)
    torch.testing.assert_close(result, expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@KINDS
def test_gates_within_a_limit(function, tokens, device, dtype):
    found = replace(made(device, dtype), activation="limited", limit=0.5)
    x, index, weights = asked(tokens, device, dtype)
    options = {"tiles": SMALL} if function is grouped_experts else {}
    expected = experts_reference(x.double(), index, weights.double(), doubled(found)).to(dtype)
    result = function(x, index, weights, found, **options)
    torch.testing.assert_close(result, expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


def doubled(found: Experts) -> Experts:
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    parts = {name: getattr(found, name) for name in names}
    return replace(found, **{name: part.double() for name, part in parts.items() if part is not None})


def test_rows_of_several_pieces_equal_the_reference(device, dtype):
    found = made(device, dtype, biased=True)
    x, index, weights = asked(3, device, dtype)
    expected = experts_reference(x.double(), index, weights.double(), doubled(found)).to(dtype)
    result = few_experts(x, index, weights, found, Pieces(up=16, down=8))
    torch.testing.assert_close(result, expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_other_activations(activation, device):
    found = replace(made(device, torch.float32), activation=activation)
    x, index, weights = asked(3, device, torch.float32)
    torch.testing.assert_close(
        few_experts(x, index, weights, found),
        experts_reference(x, index, weights, found),
        atol=1e-5,
        rtol=1e-5,
    )


def test_weights_may_stand_in_a_larger_memory(device):
    found = made(device, torch.float32)
    wide = torch.full((COUNT, 2 * INNER, HIDDEN + 3), math.nan, device=device)
    wide[..., :HIDDEN] = found.gate_up
    x, index, weights = asked(7, device, torch.float32)
    strided = replace(found, gate_up=wide[..., :HIDDEN])
    assert torch.equal(
        grouped_experts(x, index, weights, strided, SMALL), grouped_experts(x, index, weights, found, SMALL)
    )


@KINDS
def test_a_token_does_not_depend_on_others(function, tokens, device):
    """Nor on where it stands among them."""
    found = made(device, torch.float32)
    x, index, weights = asked(tokens, device, torch.float32)
    options = {"tiles": SMALL} if function is grouped_experts else {}
    result = function(x, index, weights, found, **options)
    order, kept = torch.randperm(tokens).to(device), tokens // 2
    x[order[kept:]] *= -3.0
    moved = function(x[order], index[order], weights[order], found, **options)
    assert torch.equal(moved[:kept], result[order[:kept]])


def test_all_tokens_may_ask_the_same_experts(device):
    found = made(device, torch.float32)
    x, _, weights = asked(40, device, torch.float32)
    index = torch.tensor([3, 1], device=device).expand(40, 2)
    result = experts(x, index, weights, found)
    torch.testing.assert_close(result, experts_reference(x, index, weights, found), atol=1e-5, rtol=1e-5)
    assert experts(x[:0], index[:0], weights[:0], found).shape == (0, HIDDEN)


@pytest.mark.parametrize(("tokens", "count"), [(1, 3), (7, 5), (200, 8), (90, 128)])
def test_pairs_are_sorted_by_experts_and_keep_their_order(tokens, count, device):
    index = torch.randint(count, (tokens, 3), device=device)
    found, flat = group(index, count), index.flatten()
    assert torch.equal(found.pairs, flat.argsort(stable=True).int())
    assert torch.equal(found.counts, flat.bincount(minlength=count).int())


def test_tiles_follow_how_many_rows_an_expert_has():
    gpu, small = KNOWN["H100"], KNOWN["L4"]
    rows = [tiles_of(pairs, 128, torch.bfloat16, gpu).up.rows for pairs in (128, 2048, 4096, 65536)]
    assert rows == [16, 32, 64, 128]
    assert tiles_of(65536, 128, torch.bfloat16, gpu) == TILES[-1][1]
    assert tiles_of(65536, 128, torch.bfloat16, small).up.stages == 1, "it has less shared memory"
    assert tiles_of(65536, 128, torch.float32, gpu) == EXACT
