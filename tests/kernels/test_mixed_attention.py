"""Decodes beside prefill chunks, as a layer of a mixed step launches them, against fp64 attention."""

import pytest
import torch
from paged import TOLERANCE, attend_exactly, attention_layer, fused_queries, make_paged, with_dtypes

from quire.kernels.attention.cascade import SharedPrefixes
from quire.kernels.attention.decode import DecodeMode, decode
from quire.kernels.attention.prefill import prefill
from quire.kernels.attention.splits import DecodeWorkspace

DECODES = [1, 70, 33, 0, 129, 64, 453 if torch.cuda.is_available() else 65]  # contexts; 0 pads
# Queries and contexts. On a GPU the last chunk takes far longer than all decodes.
CHUNKS = [(5, 5), (40, 75), (1, 17), (0, 0), (64, 30_000 if torch.cuda.is_available() else 90)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"), with_dtypes([(8, 2, 128), (4, 2, 64), (3, 3, 80)])
)
def test_decodes_beside_chunks(heads, kv_heads, head_dim, dtype, device):
    torch.manual_seed(0)
    lengths = [*DECODES, *(context for _, context in CHUNKS)]
    paged = make_paged(lengths, kv_heads, head_dim, 16, dtype, device)
    queries = [1] * len(DECODES) + [count for count, _ in CHUNKS]
    q = fused_queries(sum(queries), heads, head_dim, dtype).to(device)
    decodes = len(DECODES)
    starts = torch.tensor([decodes + sum(queries[decodes : decodes + i]) for i in range(len(CHUNKS) + 1)])
    scale = head_dim**-0.5
    order = torch.argsort(paged.context_lens[:decodes], descending=True).int()
    workspace = DecodeWorkspace.allocate(decodes, heads, head_dim, device)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
    layer, cache = attention_layer(heads, kv_heads, head_dim), paged.cache()
    prefill(q, out, paged.prefills(starts.int().to(device), 64, slice(decodes, None)), layer, cache)
    batch = paged.decodes(order, workspace, rows=slice(decodes))
    decode(q, out, batch, layer, cache, DecodeMode.BESIDE)
    got = out + 0  # by a kernel that waits for the last one alone
    for x, part, keys, values in zip(
        q.split(queries), got.split(queries), paged.keys, paged.values, strict=True
    ):
        exact = torch.full(x.shape, torch.nan).double()  # what is left where a decode has no context
        if len(keys):
            exact = attend_exactly(x.cpu(), keys, values, scale, 0)
        torch.testing.assert_close(part.cpu().double(), exact, atol=TOLERANCE[dtype], rtol=0, equal_nan=True)


def test_beside_is_for_plain_decodes_only(device):
    paged = make_paged([5], 1, 64, 16, torch.float32, device)
    q = fused_queries(1, 2, 64, torch.float32).to(device)
    workspace = DecodeWorkspace.allocate(1, 2, 64, device)
    batch = paged.decodes(paged.rows, workspace, SharedPrefixes(*[paged.rows] * 3))
    with pytest.raises(ValueError, match="beside a prefill"):
        decode(q, torch.empty_like(q), batch, attention_layer(2, 1, 64), paged.cache(), DecodeMode.BESIDE)
