"""Rows of projections in the order of kernels: what they give is what the model's own order gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

from quire.engine.models.general.division.modules import Summed
from quire.engine.models.general.proof import merged
from quire.engine.models.general.row_orders import order_of_head, order_of_rows, reordered, whole_table
from quire.kernels.attention.write_kv import rotate

CPU = torch.device("cpu")


@pytest.mark.parametrize("rotated", [2, 4, 6, 8])
def test_scores_of_heads_that_are_rotated_in_part_are_the_same(rotated: int) -> None:
    torch.manual_seed(0)
    angles = 10 * torch.rand(5, rotated // 2)
    q, k = torch.randn(2, 1, 3, 5, 8)
    both = torch.cat((angles, angles), dim=1)[None]
    theirs = apply_rotary_pos_emb(q, k, both.cos(), both.sin())
    table = whole_table(torch.cat((angles.cos(), angles.sin()), dim=1), 8)
    order = order_of_head(rotated, 8, CPU)
    ours = [rotate(each[..., order], table) for each in (q, k)]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other[..., order])
    torch.testing.assert_close(ours[0] @ ours[1].mT, theirs[0] @ theirs[1].mT)


def test_gates_come_behind_values() -> None:
    """Two query heads of four numbers with a gate each, and one of keys and values."""
    order = order_of_rows(2, 1, order_of_head(2, 4, CPU), gated=True).tolist()
    queries, gates = [0, 2, 1, 3, 8, 10, 9, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    assert order == [*queries, 16, 18, 17, 19, 20, 21, 22, 23, *gates]
    plain = order_of_rows(2, 1, order_of_head(4, 4, CPU), gated=False).tolist()
    assert plain == [*range(16)]


@pytest.mark.parametrize("bias", [True, False])
def test_layers_have_their_weights_again(bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, rows, bias=bias).requires_grad_(False) for rows in (8, 4, 4)]
    x = torch.randn(3, 6)
    expected = [layer(x) for layer in layers]
    order = torch.randperm(16)
    taken = reordered(layers, merged(layers), order)
    assert all(layer.weight.numel() == 0 for layer in layers)
    torch.testing.assert_close(taken.product(x), torch.cat(expected, dim=1)[:, order])
    taken.give_back()
    for layer, out in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer(x), out)


def test_what_ranks_sum_is_summed_in_any_order() -> None:
    class Twice:
        buffers = None

        def all_reduce(self, x: Tensor) -> Tensor:
            return 2 * x

    torch.manual_seed(0)
    layer, x, order = nn.Linear(6, 8).requires_grad_(False), torch.randn(3, 6), torch.randperm(8)
    summed = Summed(layer, Twice(), (0, 6))  # type: ignore[arg-type]
    layer.forward = summed
    expected = layer(x)
    taken = reordered([layer], merged([layer]), order)
    torch.testing.assert_close(taken.product(x), expected[:, order])
