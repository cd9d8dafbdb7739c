"""How much an indexer thinks of each token that a token sees, by keys of its own in a paged cache.

A score is the sum over the indexer's heads of weight · relu(query · key · scale), in fp32, as the indexers of
transformers' models have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.kv_tile import load_blocks
from quire.kernels.formats.layer_cache import LayerCache

MOST_HEADS = 128
TILE_BYTES, MOST_KEYS = 1 << 14, 128  # of a tile
PROGRAMS = 1024  # that a device is full with


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """What T tokens ask of the keys of their rows' tokens.

    q [T, H, D], weights [T, H] fp32, rows [T] each token's block table, positions [T], scale: of a product.
    most: tokens that are chosen: of a token that sees no more, scores say nothing.
    """

    q: Tensor
    weights: Tensor
    rows: Tensor
    positions: Tensor
    scale: float
    most: int

    def part(self, tokens: slice) -> IndexQueries:
        """Return what some of the tokens ask."""
        q, weights, rows, positions = (
            each[tokens] for each in (self.q, self.weights, self.rows, self.positions)
        )
        return IndexQueries(q, weights, rows, positions, self.scale, self.most)


def index_scores(queries: IndexQueries, block_tables: Tensor, cache: LayerCache, longest: int) -> Tensor:
    """Return scores [T, longest] fp32 of the tokens at those positions, −inf of those that are not seen."""
    q, weights, kv = queries.q, queries.weights, cache.kv
    tokens, heads, width = q.shape
    scores = torch.empty(tokens, longest, dtype=torch.float32, device=q.device)
    if heads > MOST_HEADS or kv.shape[1:3] != (1, 1) or width != kv.shape[-1] or q.dtype != kv.dtype:
        raise ValueError(
            f"queries {tuple(q.shape)} in {q.dtype} do not score keys {tuple(kv.shape)} in {kv.dtype}: both "
            f"must be alike, and of {MOST_HEADS} heads at most"
        )
    if tokens == 0:
        return scores
    q, weights = q.contiguous(), weights.contiguous()
    sizes, options = program(heads, width, kv.dtype)
    parts = max(min(triton.cdiv(longest, sizes["TILE"]), PROGRAMS // tokens), 1)
    _scores_kernel[tokens, parts](
        scores, q, weights, kv, block_tables, queries.rows, queries.positions, longest, queries.most,
        queries.scale, block_tables.stride(0), kv.stride(0), kv.stride(3), BLOCK_SIZE=cache.block_size,
        **sizes, **options,
    )  # fmt: skip
    return scores


def program(heads: int, width: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of a program of the kernel, and how it is compiled."""
    lanes, dim = (max(16, triton.next_power_of_2(size)) for size in (heads, width))
    tile = min(max(16, TILE_BYTES // (dim * dtype.itemsize)), MOST_KEYS)
    sizes = {"HEADS": heads, "LANES": lanes, "WIDTH": width, "DIM": dim, "TILE": tile}
    stages = 3 if dtype.itemsize == 2 else 2
    return sizes, {"num_warps": 4 if lanes <= 64 else 8, "num_stages": stages}


def index_scores_reference(
    queries: IndexQueries, block_tables: Tensor, cache: LayerCache, longest: int
) -> Tensor:
    """Do the same as `index_scores` in plain torch."""
    size = cache.block_size
    position = torch.arange(longest, device=block_tables.device)
    seen = position <= queries.positions[:, None]
    tables = block_tables[queries.rows.long(), : -(-longest // size)].long()
    blocks = tables.masked_fill(~seen[:, ::size], 0)  # what follows a row's own may be anything
    keys = cache.kv[blocks, 0, 0].flatten(1, 2)[:, :longest].masked_fill(~seen[:, :, None], 0)
    products = torch.einsum("thd,tld->thl", queries.q.float(), keys.float()) * queries.scale
    scores = torch.einsum("th,thl->tl", queries.weights, products.relu())
    return scores.masked_fill(~seen, -torch.inf)


@triton.jit(do_not_specialize=["longest", "most"])
def _scores_kernel(
    scores: tl.tensor,
    q: tl.tensor,
    weights: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    longest: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The scores that one token gives to every so-manieth tile of its row."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    num_keys = tl.minimum(tl.load(positions + token) + 1, longest)
    if num_keys <= most:
        return
    table = block_tables + tl.load(rows + token).to(tl.int64) * table_stride
    own = scores + token * longest
    head, dim = tl.arange(0, LANES), tl.arange(0, DIM)
    is_number = dim < WIDTH
    is_query = (head < HEADS)[:, None] & is_number[None, :]
    place = q + (token * HEADS + head)[:, None] * WIDTH + dim[None, :]
    queries = tl.load(place, mask=is_query, other=0.0)
    weight = tl.load(weights + token * HEADS + head, mask=head < HEADS, other=0.0)
    known = tl.cdiv(num_keys, TILE)
    blocks = load_blocks(table, part * TILE, num_keys, BLOCK_SIZE, TILE)
    for tile in range(part, known, parts):
        key = tile * TILE + tl.arange(0, TILE)
        following = load_blocks(table, (tile + parts) * TILE, num_keys, BLOCK_SIZE, TILE)
        pointer = kv + (blocks.to(tl.int64) * block_stride + key % BLOCK_SIZE * slot_stride)
        inside = key < num_keys
        keys = tl.load(pointer[:, None] + dim[None, :], mask=inside[:, None] & is_number[None, :], other=0.0)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        total = tl.sum(tl.maximum(products, 0.0) * weight[:, None], axis=0)
        tl.store(own + key, tl.where(inside, total, float("-inf")), mask=key < longest)
        blocks = following
    for tile in range(known + part, tl.cdiv(longest, TILE), parts):
        key = tile * TILE + tl.arange(0, TILE)
        tl.store(own + key, tl.full([TILE], float("-inf"), tl.float32), mask=key < longest)
