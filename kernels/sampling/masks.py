"""Forbidding tokens: logits of those that a bit mask leaves out become -inf."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens of a program


def mask_tokens(logits: Tensor, rows: Tensor, masks: Tensor, first: int) -> None:
    """Mask rows [M] i64 of logits [S, V] in place; the others are not touched.

    first: the token of column 0. masks [M, W] i32: bit t % 32 of word t // 32 says whether token t stays.
    """
    count, words = masks.shape
    vocabulary = logits.shape[1]
    if count and vocabulary:
        _mask_tokens_kernel[(count, triton.cdiv(vocabulary, BLOCK))](
            logits, rows, masks, logits.stride(0), words, vocabulary, first, BLOCK, num_warps=4
        )


def mask_tokens_reference(logits: Tensor, rows: Tensor, masks: Tensor, first: int) -> None:
    """Do the same as `mask_tokens` in plain torch."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((masks.unsqueeze(-1) >> bits) & 1).flatten(1)[:, first : first + logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


@triton.jit
def _mask_tokens_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    vocabulary: tl.tensor,
    first: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    masked = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    token = first + column
    word = tl.load(masks_ptr + masked * words + token // 32, inside, other=-1)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    row = tl.load(rows_ptr + masked)
    tl.store(logits_ptr + row * stride + column, float("-inf"), forbidden)
