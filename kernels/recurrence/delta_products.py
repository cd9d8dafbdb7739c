"""What chunks of the gated delta rule are multiplied to before their states are known.

Of the tokens of a chunk, with c the sum of log decays up to each, in a state S ahead of the chunk:

    changes = values - reads S                           what each token adds to the state at its key
    out     = queries S + scores changes
    S'      = exp(c of the last) S + keys^T changes

where, with T = (I + tril(beta_i k_i k_j exp(c_i - c_j), -1))^-1:

    values = T beta v             reads = T beta k exp(c)
    queries = q exp(c)            keys = k exp(c of the last - c)
    scores = tril(q_i k_j exp(c_i - c_j))

(The WY representation and the UT transform, Yang et al. 2024; with decays of each number of a key, Kimi Team
2025.) No exponent is above 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrence.step import CHUNK

EPS = 1e-6  # beside the square of a vector's length, as transformers has it
COLUMNS = 32  # of keys and values that a program multiplies at a time: with 64 registers are not enough
WARPS = 4
BY_KEY_WARPS = 8  # if each number of a key has decays of its own, which takes more registers


class Products(NamedTuple):
    """Of C chunks and Hv heads, see above. Rows behind a chunk's tokens are 0; of empty chunks undefined.

    In q's dtype if nothing else is said: to round them to 16 bits changes results about as much as it did to
    round q, k and v. With 128 numbers that is 88 KiB of memory for a chunk and a head.
    """

    queries: Tensor  # [C, Hv, CHUNK, Dk]
    keys: Tensor  # [C, Hv, CHUNK, Dk]
    reads: Tensor  # [C, Hv, CHUNK, Dk]
    values: Tensor  # [C, Hv, CHUNK, Dv] in fp32: what the state says of keys is subtracted
    scores: Tensor  # [C, Hv, CHUNK, CHUNK]
    decays: Tensor  # [C, Hv, Dk] in fp32


def rows_of(x: Tensor) -> Tensor:
    """Return x [T, ...] with each token's numbers next to each other; tokens may lie apart."""
    return x if x[:1].is_contiguous() else x.contiguous()


def products_of_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Tensor, *, normalised: bool
) -> Products:
    """Multiply what `delta_rule.gated_delta_rule` takes, for each of the chunks [C, 4], at least one."""
    (heads, value_dim), (key_heads, key_dim) = v.shape[1:], k.shape[1:]
    each = (len(chunks), heads)
    of_keys = (*each, CHUNK, key_dim)
    products = Products(
        queries=q.new_empty(of_keys),
        keys=q.new_empty(of_keys),
        reads=q.new_empty(of_keys),
        values=q.new_empty(*each, CHUNK, value_dim, dtype=torch.float32),
        scores=q.new_empty(*each, CHUNK, CHUNK),
        decays=q.new_empty(*each, key_dim, dtype=torch.float32),
    )
    by_key = g.dim() == 3
    # Of products of fp32, and of those of the inverse: an error there is in all of the chunk
    precision = ("ieee", "ieee") if q.dtype == torch.float32 else ("tf32", "tf32x3")
    _products_kernel[(heads, len(chunks))](
        q, k, v, g, beta, chunks, *products, *(x.stride(0) for x in (q, k, v, g, beta)), key_dim**-0.5,
        heads, heads // key_heads, key_dim, value_dim, COLUMNS, CHUNK.bit_length() - 1, by_key,
        normalised, EPS, *precision, num_warps=BY_KEY_WARPS if by_key else WARPS,
        num_stages=1,
    )  # fmt: skip
    return products


@triton.jit
def inverse(a: tl.tensor, LEVELS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Return (I + a)^-1, where a is strictly lower triangular, with 2 ** LEVELS rows, 16 or more.

    By blocks on the diagonal, twice as large each time: of two such blocks P and Q with C below P, the
    inverse has P^-1, Q^-1 and -Q^-1 C P^-1. So all that is multiplied is about as large as the inverse
    itself, where powers of a may be far larger.
    """
    ROWS: tl.constexpr = 1 << LEVELS
    SMALL: tl.constexpr = 16  # up to this size blocks are multiplied alone, beyond with the zeros beside them
    BLOCKS: tl.constexpr = ROWS // SMALL
    here = tl.arange(0, BLOCKS)[:, None, None, None] == tl.arange(0, BLOCKS)[None, None, :, None]
    small = tl.sum(tl.where(here, a.reshape(BLOCKS, SMALL, BLOCKS, SMALL), 0.0), 2)
    i, j = tl.arange(0, SMALL)[None, :, None], tl.arange(0, SMALL)[None, None, :]
    blocks = tl.where(i == j, 1.0, 0.0) - tl.where(i >> 1 == j >> 1, small, 0.0)
    for level in tl.static_range(1, 4):
        below = tl.where((i >> level != j >> level) & (i >> level + 1 == j >> level + 1), small, 0.0)
        product = tl.dot(blocks, below, input_precision="ieee")
        blocks -= tl.dot(product, blocks, input_precision="ieee")
    result = tl.where(here, blocks[:, :, None, :], 0.0).reshape(ROWS, ROWS)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    for level in tl.static_range(4, LEVELS):
        inside = (row >> level != column >> level) & (row >> level + 1 == column >> level + 1)
        doubled = tl.dot(result, tl.where(inside, a, 0.0), input_precision=PRECISION)
        result -= tl.dot(doubled, result, input_precision=PRECISION)
    return result


@triton.jit
def add_decayed(
    q: tl.tensor,
    k: tl.tensor,
    sums: tl.tensor,
    scores: tl.tensor,
    system: tl.tensor,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add to scores the sum of q_i k_j exp(sums_i - sums_j) over columns, where i > j, and to system of k_i.

    The rows i and j of a pair first differ in one bit, which i has. Both decay to the row between them from
    which on rows have it: neither exponent is above 0, however much decays before, between or after.
    """
    ROWS: tl.constexpr = 1 << LEVELS
    row = tl.arange(0, ROWS)
    for level in range(LEVELS):
        late = (row >> level) % 2 == 1
        between = (row >> level) + tl.where(late, 0, 1) << level
        there = tl.gather(sums, tl.broadcast_to(between[:, None], sums.shape), 0)
        factor = tl.exp(tl.where(late[:, None], sums - there, there - sums))
        pairs = late[:, None] & ~late[None, :] & (row[:, None] >> level + 1 == row[None, :] >> level + 1)
        right = tl.trans(k * factor)
        scores += tl.where(pairs, tl.dot(q * factor, right, input_precision=PRECISION), 0.0)
        system += tl.where(pairs, tl.dot(k * factor, right, input_precision=PRECISION), 0.0)
    return scores, system


@triton.jit
def _products_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    g_stride: tl.tensor,
    beta_stride: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr,
    BY_KEY: tl.constexpr,
    NORMALISED: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
) -> None:
    """Compute all products of a chunk and a value head."""
    CHUNK: tl.constexpr = 1 << LEVELS
    head, chunk = tl.program_id(0), tl.program_id(1)
    tokens = tl.load(chunks_ptr + 4 * chunk + 1)
    if tokens == 0:
        return
    row = tl.arange(0, CHUNK)
    column = tl.arange(0, COLUMNS)
    of_chunk = row < tokens
    token = tl.load(chunks_ptr + 4 * chunk).to(tl.int64) + row
    place = chunk.to(tl.int64) * HEADS + head
    q_rows = q_ptr + (token * q_stride + head // GROUP * KEY_DIM)[:, None]
    k_rows = k_ptr + (token * k_stride + head // GROUP * KEY_DIM)[:, None]
    v_rows = v_ptr + (token * v_stride + head * VALUE_DIM)[:, None]
    beta = tl.load(beta_ptr + token * beta_stride + head, of_chunk, other=0.0).to(tl.float32)
    # First q_i k_j and k_i k_j, with decays, and squares of lengths: each a sum over the key's numbers
    q_squares = tl.zeros((CHUNK,), tl.float32)
    k_squares = tl.zeros((CHUNK,), tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    system = tl.zeros((CHUNK, CHUNK), tl.float32)
    if BY_KEY:
        g_rows = g_ptr + (token * g_stride + head * KEY_DIM)[:, None]
        diagonal = tl.zeros((CHUNK,), tl.float32)
    else:
        g = tl.load(g_ptr + token * g_stride + head, of_chunk, other=0.0).to(tl.float32)
        sums = tl.cumsum(g, 0)
        total = tl.sum(g, 0)
    for start in range(0, KEY_DIM, COLUMNS):
        inside = of_chunk[:, None] & (start + column < KEY_DIM)[None, :]
        q = tl.load(q_rows + start + column[None, :], inside, other=0.0)
        k = tl.load(k_rows + start + column[None, :], inside, other=0.0)
        wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
        if NORMALISED:
            q_squares += tl.sum(wide_q * wide_q, 1)
            k_squares += tl.sum(wide_k * wide_k, 1)
        if BY_KEY:
            g = tl.load(g_rows + start + column[None, :], inside, other=0.0).to(tl.float32)
            diagonal += tl.sum(wide_q * wide_k, 1)
            scores, system = add_decayed(wide_q, wide_k, tl.cumsum(g, 0), scores, system, LEVELS, PRECISION)
        else:
            scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
            system = tl.dot(k, tl.trans(k), system, input_precision=PRECISION)
    if BY_KEY:
        scores += tl.where(row[:, None] == row[None, :], diagonal[:, None], 0.0)
    else:
        differences = tl.where(row[:, None] >= row[None, :], sums[:, None] - sums[None, :], float("-inf"))
        scores *= tl.exp(differences)
        system *= tl.exp(differences)
    q_scale = tl.full((CHUNK,), 1.0, tl.float32) * scale
    k_scale = tl.full((CHUNK,), 1.0, tl.float32)
    if NORMALISED:
        q_scale *= tl.rsqrt(q_squares + EPS)
        k_scale *= tl.rsqrt(k_squares + EPS)
    scores *= q_scale[:, None] * k_scale[None, :]
    tl.store(scores_ptr + place * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :], scores)
    system *= (beta * k_scale)[:, None] * k_scale[None, :]
    system = tl.where(row[:, None] > row[None, :], system, 0.0)
    solved = inverse(system, LEVELS, INVERSE_PRECISION) * beta[None, :]

    # Then what T is multiplied to, and all that is a row's alone
    values_ptr += place * CHUNK * VALUE_DIM
    for start in range(0, VALUE_DIM, COLUMNS):
        in_value = (start + column < VALUE_DIM)[None, :]
        v = tl.load(v_rows + start + column[None, :], of_chunk[:, None] & in_value, other=0.0)
        values = tl.dot(solved, v.to(tl.float32), input_precision=PRECISION)
        tl.store(values_ptr + row[:, None] * VALUE_DIM + start + column[None, :], values, in_value)
    for start in range(0, KEY_DIM, COLUMNS):
        in_key = start + column < KEY_DIM
        inside = of_chunk[:, None] & in_key[None, :]
        q = tl.load(q_rows + start + column[None, :], inside, other=0.0).to(tl.float32) * q_scale[:, None]
        k = tl.load(k_rows + start + column[None, :], inside, other=0.0).to(tl.float32) * k_scale[:, None]
        if BY_KEY:
            g = tl.load(g_rows + start + column[None, :], inside, other=0.0).to(tl.float32)
            till, whole = tl.cumsum(g, 0), tl.sum(g, 0)
        else:
            till, whole = sums[:, None], tl.full((COLUMNS,), 0.0, tl.float32) + total
        decayed = tl.exp(till)
        reads = tl.dot(solved, k * decayed, input_precision=PRECISION)
        places = place * CHUNK * KEY_DIM + row[:, None] * KEY_DIM + start + column[None, :]
        tl.store(reads_ptr + places, reads, in_key[None, :])
        tl.store(queries_ptr + places, q * decayed, in_key[None, :])
        tl.store(keys_ptr + places, k * tl.exp(whole[None, :] - till), in_key[None, :])
        tl.store(decays_ptr + place * KEY_DIM + start + column, tl.exp(whole), in_key)
