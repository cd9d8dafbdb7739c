"""Decodes beside prefill chunks, as a layer of a mixed step launches them, against fp64 attention."""

import pytest
import torch
from paged import TOLERANCE, attend_exactly, fused_queries, make_paged

from kernels.decode_attention import decode_attention
from kernels.decode_splits import DecodeWorkspace
from kernels.prefill_attention import prefill_attention

DECODES = [1, 70, 33, 0, 129, 64]  # contexts; 0 pads
CHUNKS = [(5, 5), (40, 75), (1, 17), (0, 0)]  # queries and contexts


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (4, 2, 64), (3, 3, 80)])
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
    prefill_attention(
        q, out, paged.kv, paged.block_tables, paged.rows[decodes:], starts.int().to(device),
        paged.context_lens[decodes:], 40, scale, 0,
    )  # fmt: skip
    decode_attention(
        q, out, paged.kv, paged.block_tables, paged.rows[:decodes], paged.context_lens[:decodes], order,
        scale, 0, workspace, beside=True,
    )  # fmt: skip
    got = out + 0  # by a kernel that waits for the last one alone
    for x, part, keys, values in zip(
        q.split(queries), got.split(queries), paged.keys, paged.values, strict=True
    ):
        if len(x) and len(keys):
            exact = attend_exactly(x.cpu(), keys, values, scale, 0)
            torch.testing.assert_close(part.cpu().double(), exact, atol=TOLERANCE[dtype], rtol=0)
