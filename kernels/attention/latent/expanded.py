"""Attention to latents that were expanded to keys and values of each head, from many queries per sequence.

A key is two parts, the second of which, rotated by position, all heads have in common: it stays where the
latent is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.attention.key_tiles import SPARE_BYTES
from quire.kernels.attention.kv_tile import LOG2_E, LOWEST, attend_by_scores
from quire.kernels.attention.latent.expansion import Expansion
from quire.kernels.attention.prefill import find_sequence
from quire.kernels.gpu import Gpu, gpu_of

LEAST_DIM = 16  # of a product
HEADS_AT_ONCE = 8  # whose keys and values are read by many programs while they are in the L2 cache


@dataclass(frozen=True, slots=True)
class ExpandedTiles:
    """queries of a program, keys of a tile, and stages as `attention.key_tiles.KeyTiles` has them."""

    queries: int
    keys: int
    stages: int
    warps: int


# The largest first; shared memory bounds what a GPU takes.
_TILES = (
    ExpandedTiles(128, 64, 3, 8),
    ExpandedTiles(128, 64, 2, 8),
    ExpandedTiles(128, 32, 2, 8),
    ExpandedTiles(64, 32, 2, 4),
    ExpandedTiles(64, 32, 1, 4),
    ExpandedTiles(32, 16, 1, 4),
)


@cache
def expanded_tiles(
    gpu: Gpu, plain: int, rotated: int, value: int, dtype: torch.dtype
) -> ExpandedTiles | None:
    """Return the tiles for heads of such numbers, or None where none fits."""
    key, whole = padded(plain) + padded(rotated), padded(plain) + padded(rotated) + padded(value)
    for tiles in _TILES:
        weights = tiles.queries * (tiles.keys + 1)
        numbers = tiles.queries * key + weights + tiles.stages * tiles.keys * whole
        if numbers * dtype.itemsize + SPARE_BYTES <= gpu.shared_memory:
            return tiles
    return None


def padded(numbers: int) -> int:
    """Return how many numbers a product takes of so many."""
    return max(LEAST_DIM, triton.next_power_of_2(numbers))


@dataclass(frozen=True, slots=True)
class Expanded:
    """Keys and values of N tokens.

    heads [N, H, plain + value], contiguous; rotated [N, …]: the other part of their keys. starts [R + 1]: the
    tokens that each of R sequences sees, from its first query on; None: its own, each those up to itself.
    """

    heads: Tensor
    rotated: Tensor
    starts: Tensor | None = None


def attend_to_expanded(
    q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    keys: Expanded,
    expansion: Expansion,
    query_starts: Tensor,
    layer: AttentionLayer,
) -> None:
    """Attend from q [H, T, plain + rotated], queries of R sequences, to the keys of each: out [T, H, value].

    lse [T, H] fp32: the log-sum-exps (base 2) of scores of keys that were attended to before, −inf where none
    were: what `out` holds of those is merged, and lse written for what follows. None: there were none. The
    grid depends on shapes only. `out` is left alone where a sequence has no queries or sees no keys.
    """
    heads, tokens, width = q.shape
    rotated = width - expansion.plain
    tiles = expanded_tiles(gpu_of(q.device), expansion.plain, rotated, expansion.value, q.dtype)
    count = len(query_starts) - 1
    _check(q, out, keys, expansion)
    if tiles is None:
        raise ValueError(f"no tile of heads of {width} and {expansion.value} numbers in {q.dtype} fits")
    if tokens == 0 or count == 0:
        return
    at_once = min(HEADS_AT_ONCE, heads)
    _kernel[at_once, tokens // tiles.queries + count, triton.cdiv(heads, at_once)](
        out, lse, q, keys.heads, keys.rotated, query_starts, keys.starts, count, layer.scale * LOG2_E,
        q.stride(0), q.stride(1), keys.rotated.stride(0),
        HEADS=heads, PLAIN=expansion.plain, REST=rotated, VALUE=expansion.value,
        PLAIN_DIM=padded(expansion.plain), REST_DIM=padded(rotated), VALUE_DIM=padded(expansion.value),
        QUERIES=tiles.queries, TILE=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _check(q: Tensor, out: Tensor, keys: Expanded, expansion: Expansion) -> None:
    """Raise ValueError unless the tensors are laid out as the kernel reads them."""
    heads, tokens, width = q.shape
    expected = (len(keys.rotated), heads, expansion.plain + expansion.value)
    if keys.heads.shape != expected or not keys.heads.is_contiguous():
        raise ValueError(
            f"keys and values must be contiguous, {expected}, and are {tuple(keys.heads.shape)} with strides "
            f"{keys.heads.stride()}"
        )
    if out.shape != (tokens, heads, expansion.value) or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, {(tokens, heads, expansion.value)}, and is {tuple(out.shape)} with "
            f"strides {out.stride()}"
        )
    rotated = width - expansion.plain
    if q.stride(2) != 1 or keys.rotated.shape[1] < rotated or keys.rotated.stride(1) != 1:
        raise ValueError(
            f"queries of {width} numbers, {rotated} of them rotated, with strides {q.stride()} do not attend "
            f"to {tuple(keys.rotated.shape)} with strides {keys.rotated.stride()}: numbers must be contiguous"
        )


@triton.jit
def _load(
    source: tl.tensor, offset: tl.tensor, inside: tl.tensor, NUMBERS: tl.constexpr, DIM: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load vectors [M, DIM] from `offset` [M] on; 0 past NUMBERS, and where not inside, if MASKED."""
    dim = tl.arange(0, DIM)
    pointer = source + offset[:, None] + dim[None, :]
    if MASKED:
        found = tl.load(pointer, mask=inside[:, None] & (dim < NUMBERS)[None, :], other=0.0)
    elif NUMBERS < DIM:
        found = tl.load(pointer, mask=(dim < NUMBERS)[None, :], other=0.0)
    else:
        found = tl.load(pointer)
    return found


@triton.jit(do_not_specialize=["num_sequences"])
def _kernel(
    out: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    heads: tl.tensor,
    rotated: tl.tensor,
    query_starts: tl.tensor,
    key_starts: tl.tensor,
    num_sequences: tl.tensor,
    scale_log2: tl.tensor,
    q_head_stride: tl.tensor,
    q_stride: tl.tensor,
    rotated_stride: tl.tensor,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Attend from QUERIES consecutive queries of a sequence, for one head."""
    CAUSAL: tl.constexpr = key_starts is None
    ROW: tl.constexpr = HEADS * (PLAIN + VALUE)
    head = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    # A sequence's later tiles see more keys: start the heavy ones first.
    sequence, query_tile = find_sequence(
        query_starts, num_sequences, tl.num_programs(1) - 1 - tl.program_id(1), QUERIES
    )
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    first_query = query_tile * QUERIES
    if (first_query >= query_len) | (head >= HEADS):
        return
    if CAUSAL:
        key_start = query_start
        num_keys = tl.minimum(first_query + QUERIES, query_len)
        whole_tiles = (first_query + 1) // TILE  # which all queries see
    else:
        key_start = tl.load(key_starts + sequence)
        num_keys = tl.load(key_starts + sequence + 1) - key_start
        whole_tiles = num_keys // TILE
        if num_keys == 0:
            return

    query = first_query + tl.arange(0, QUERIES)
    is_query = query < query_len
    token = (query_start + query).to(tl.int64)
    q_offset = head.to(tl.int64) * q_head_stride + token * q_stride
    q_plain = _load(q, q_offset, is_query, PLAIN, PLAIN_DIM, True)
    q_rest = _load(q, q_offset + PLAIN, is_query, REST, REST_DIM, True)
    place = (token * HEADS + head) * VALUE
    if lse is not None:
        before = tl.load(lse + token * HEADS + head, mask=is_query, other=float("-inf"))
        seen_before = before > LOWEST
        acc = _load(out, place, is_query & seen_before, VALUE, VALUE_DIM, True).to(tl.float32)
        peak = tl.where(seen_before, before, LOWEST)
        total = tl.where(seen_before, 1.0, 0.0)
    else:
        acc = tl.zeros([QUERIES, VALUE_DIM], tl.float32)
        peak = tl.full([QUERIES], LOWEST, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
    heads += key_start.to(tl.int64) * ROW + head * (PLAIN + VALUE)
    rotated += key_start.to(tl.int64) * rotated_stride
    for tile in range(0, whole_tiles):
        key = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        k = _load(heads, key * ROW, True, PLAIN, PLAIN_DIM, False)
        k_rest = _load(rotated, key * rotated_stride, True, REST, REST_DIM, False)
        v = _load(heads, key * ROW + PLAIN, True, VALUE, VALUE_DIM, False)
        scores = tl.dot(q_plain, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        acc, peak, total = attend_by_scores(scores, v, True, acc, peak, total, scale_log2, False)
    for tile in range(whole_tiles, tl.cdiv(num_keys, TILE)):
        key = tile * TILE + tl.arange(0, TILE)
        inside = key < num_keys
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= query[:, None])
        key = key.to(tl.int64)
        k = _load(heads, key * ROW, inside, PLAIN, PLAIN_DIM, True)
        k_rest = _load(rotated, key * rotated_stride, inside, REST, REST_DIM, True)
        v = _load(heads, key * ROW + PLAIN, inside, VALUE, VALUE_DIM, True)
        scores = tl.dot(q_plain, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        acc, peak, total = attend_by_scores(scores, v, seen, acc, peak, total, scale_log2, True)

    total = tl.where(is_query, total, 1.0)
    dim = tl.arange(0, VALUE_DIM)
    acc = acc / total[:, None]
    offset = place[:, None] + dim[None, :]
    tl.store(out + offset, acc.to(out.dtype.element_ty), mask=is_query[:, None] & (dim < VALUE)[None, :])
    if not CAUSAL:
        tl.store(lse + token * HEADS + head, peak + tl.log2(total), mask=is_query)
