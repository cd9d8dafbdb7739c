"""A random paged cache full of poison, and fp64 attention over what it really holds."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.attention.batch import AttentionLayer, DecodeBatch, PrefillBatch
from quire.kernels.attention.cascade import SharedPrefixes
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.formats.layer_cache import LayerCache

HAS_GPU = torch.cuda.is_available()
# The interpreter multiplies bf16's raw bits, so bf16 is for the GPU.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_GPU
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
NO_BLOCK = 2**31 - 1  # reading it is an illegal access
UNTOUCHED = 7.0  # what an output holds where nothing is to be written


def attention_layer(
    heads: int, kv_heads: int, head_dim: int, window: int = 0, **others: Any
) -> AttentionLayer:
    """A layer with the usual scale."""
    return AttentionLayer(heads, kv_heads, head_dim, head_dim**-0.5, window, **others)


def with_dtypes(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each case with each dtype; the interpreter takes its time, and there the cases take turns."""
    if HAS_GPU:
        return [(*case, dtype) for case in cases for dtype in DTYPES]
    return [(*case, DTYPES[i % len(DTYPES)]) for i, case in enumerate(cases)]


@dataclass
class Paged:
    """One layer's view of a cache and its tables, and the keys and values [context, Hkv, D] of each row."""

    kv: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    context_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def cache(self, kv: torch.Tensor | None = None) -> LayerCache:
        """The cache as the kernels take it; or `kv` in its place."""
        kv = self.kv if kv is None else kv
        return LayerCache(kv, UNSCALED[kv.dtype])

    def decodes(
        self,
        order: torch.Tensor,
        workspace: DecodeWorkspace | DecodeGather,
        shared: SharedPrefixes | None = None,
        rows: slice = slice(None),
    ) -> DecodeBatch:
        """A query for each of the rows."""
        return DecodeBatch(
            self.block_tables, self.rows[rows], self.context_lens[rows], order, workspace, shared
        )

    def prefills(self, query_starts: torch.Tensor, longest: int, rows: slice = slice(None)) -> PrefillBatch:
        """Queries for each of the rows, up to `longest` of one."""
        return PrefillBatch(
            self.block_tables, self.rows[rows], query_starts, self.context_lens[rows], longest
        )


def make_paged(
    context_lens: list[int],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Paged:
    """Blocks and rows in random order; unused slots are NaN and unused table entries point nowhere."""
    blocks = [-(-length // block_size) for length in context_lens]
    spare = 3
    cache = torch.full(
        (sum(blocks) + spare, 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype
    )
    kv = cache[:, 1]
    free = torch.randperm(cache.shape[0]).tolist()
    rows = torch.randperm(len(context_lens) + spare)[: len(context_lens)].int()
    block_tables = torch.full((len(context_lens) + spare, max(blocks) + 1), NO_BLOCK, dtype=torch.int32)
    held: list[list[torch.Tensor]] = [[], []]
    for row, length, count in zip(rows.tolist(), context_lens, blocks, strict=True):
        table = [free.pop() for _ in range(count)]
        block_tables[row, :count] = torch.tensor(table, dtype=torch.int32)
        for part in (0, 1):
            content = torch.randn(length, num_kv_heads, head_dim).to(dtype)
            held[part].append(content)
            for i in range(count):
                chunk = content[i * block_size : (i + 1) * block_size]
                kv[table[i], part, :, : len(chunk)] = chunk.transpose(0, 1)
    lengths = torch.tensor(context_lens, dtype=torch.int32)
    return Paged(
        cache.to(device)[:, 1], block_tables.to(device), rows.to(device), lengths.to(device), held[0], held[1]
    )


def fused_queries(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Queries [tokens, heads, head_dim] as the model has them: a view of wider rows, NaN beside it."""
    rows = torch.full((tokens, (heads + 2) * head_dim), torch.nan, dtype=dtype)
    q = rows[:, : heads * head_dim].view(tokens, heads, head_dim)
    return q.copy_(torch.randn(q.shape))


def attend_exactly(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Causal attention in fp64 of q [Q, Hq, D], the last Q tokens of keys and values [context, Hkv, D]."""
    context_len, kv_heads, _ = keys.shape
    group = q.shape[1] // kv_heads
    k = keys.double().repeat_interleave(group, 1)
    v = values.double().repeat_interleave(group, 1)
    position = torch.arange(context_len - q.shape[0], context_len)[:, None]
    age = position - torch.arange(context_len)
    hidden = (age < 0) | ((age >= window) if window else torch.tensor(False))
    scores = torch.einsum("qhd,khd->hqk", q.cpu().double(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def decode_exactly(q: torch.Tensor, paged: Paged, window: int) -> torch.Tensor:
    """Attention in fp64 of each row's newest token, q [B, Hq, D]; UNTOUCHED for rows without context."""
    parts = [
        attend_exactly(x, k, v, q.shape[-1] ** -0.5, window) if len(k) else torch.full(x.shape, UNTOUCHED)
        for x, k, v in zip(q.cpu().split(1), paged.keys, paged.values, strict=True)
    ]
    return torch.cat([part.double() for part in parts])


def poisoned_workspace(batch: int, heads: int, head_dim: int, device: torch.device) -> DecodeWorkspace:
    """Scratch that is NaN until it is written."""
    workspace = DecodeWorkspace.allocate(batch, heads, head_dim, device)
    for scratch in (workspace.partials, workspace.lse, workspace.prefix.partials, workspace.prefix.lse):
        scratch.fill_(torch.nan)
    return workspace


def share_prefixes(paged: Paged, cascades: list[list[int]], tokens: list[int]) -> None:
    """Have the sequences of each cascade name the first one's blocks for their first so many tokens."""
    block_size = paged.kv.shape[3]
    for (first, *others), shared in zip(cascades, tokens, strict=True):
        assert shared % block_size == 0
        for other in others:
            table = paged.block_tables[paged.rows[other]]
            table[: shared // block_size] = paged.block_tables[paged.rows[first], : shared // block_size]
            for held in (paged.keys, paged.values):
                held[other][:shared] = held[first][:shared]


def forget(paged: Paged, row: int, position: int) -> int:
    """Make what the cache holds of a token NaN, as if it were still to be written; return its slot."""
    size = paged.kv.shape[3]
    block = int(paged.block_tables[paged.rows[row], position // size])
    paged.kv[block, :, :, position % size] = torch.nan
    return block * size + position % size
