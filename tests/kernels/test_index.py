"""What an indexer does over a paged cache of its keys: scores against fp64, and rotation."""

from __future__ import annotations

import pytest
import torch
from paged import make_paged

from quire.kernels.attention.index.rotation import rotate_index, rotate_index_reference
from quire.kernels.attention.index.scores import IndexQueries, index_scores, index_scores_reference
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.formats.layer_cache import LayerCache

MOST = 8
SHAPES = [(4, 16, 16), (20, 24, 4), (70, 64, 32)]  # heads, width, block size


@pytest.mark.parametrize(("heads", "width", "block_size"), SHAPES)
@pytest.mark.parametrize("score", [index_scores, index_scores_reference])
def test_scores_of_tokens_of_several_rows(
    score, heads: int, width: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Of two rows, of one that sees no more than may be chosen, and of one that pads."""
    paged = make_paged([150, 5, 40, 0], 1, width, block_size, dtype, device)
    cache = LayerCache(paged.kv[:, :1], UNSCALED[dtype], latent=width)
    places = [(0, 149), (1, 4), (2, 38), (2, 39), (3, -1)]
    q = torch.randn(len(places), heads, width).to(dtype)
    weights = torch.randn(len(places), heads)
    rows = paged.rows[[row for row, _ in places]]
    positions = torch.tensor([position for _, position in places], dtype=torch.int32, device=device)
    queries = IndexQueries(q.to(device), weights.to(device), rows, positions, 0.3, MOST)
    found = score(queries, paged.block_tables, cache, 151).cpu()
    for token, (row, position) in enumerate(places):
        if position < MOST:
            continue
        products = q[token].double() @ paged.keys[row][: position + 1, 0].double().T * 0.3
        expected = weights[token].double() @ products.relu()
        torch.testing.assert_close(found[token, : position + 1].double(), expected, atol=1e-4, rtol=1e-5)
        assert (found[token, position + 1 :] == -torch.inf).all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    paged = make_paged([4], 1, 16, 4, torch.float32, device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    q, weights = torch.zeros(1, 4, 24, device=device), torch.zeros(1, 4, device=device)
    cache = LayerCache(paged.kv[:, :1], UNSCALED[torch.float32], latent=16)
    with pytest.raises(ValueError, match=r"queries \(1, 4, 24\) in torch.float32 do not score keys"):
        index_scores(IndexQueries(q, weights, none, none, 1.0, 1), paged.block_tables, cache, 4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("last", "heads", "width", "rotated"), [(False, 3, 24, 8), (True, 70, 16, 16)])
def test_rotation_is_rounded_as_the_models_own(
    interleaved: bool,
    wide: bool,
    last: bool,
    heads: int,
    width: int,
    rotated: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """wide: cosines and sines are in fp32, as a model may have them, and so is all up to the result."""
    x = torch.randn(5, heads, width).to(device, dtype)
    angles = torch.randn(5, rotated // 2, device=device).repeat(1, 2)
    cos, sin = (each if wide else each.to(dtype) for each in (angles.cos(), angles.sin()))
    found, expected = (
        rotate(x, cos, sin, interleaved=interleaved, last=last).to(dtype)
        for rotate in (rotate_index, rotate_index_reference)
    )
    # In fp32 a product may be rounded together with the sum, and a result to the next number of x's type.
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps if wide else 0.0
    torch.testing.assert_close(found, expected, atol=1e-6 if wide else tolerance, rtol=tolerance)
