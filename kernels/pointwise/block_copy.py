"""Copies whole KV-cache blocks: what a copy-on-write asks for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # 32-bit words that one program copies


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy block src to dst for each (src, dst) of pairs [C, 2]; no dst is another pair's src or dst."""
    if not cache.is_contiguous():
        raise ValueError("copy_blocks needs the whole, contiguous cache, got a strided view of it")
    if len(pairs) == 0:
        return
    words = cache.view(len(cache), -1).view(torch.int32)
    grid = (len(pairs), triton.cdiv(words.shape[1], WORDS))
    _copy_blocks_kernel[grid](words, pairs.contiguous(), words.shape[1], WORDS, num_warps=8)


def copy_blocks_reference(cache: Tensor, pairs: Tensor) -> None:
    """Do the same as `copy_blocks` in plain torch."""
    source, destination = pairs.long().unbind(1)
    cache[destination] = cache[source]


@triton.jit
def _copy_blocks_kernel(
    words_ptr: tl.tensor, pairs_ptr: tl.tensor, block_words: tl.tensor, WORDS: tl.constexpr
) -> None:
    pair = pairs_ptr + tl.program_id(0) * 2
    source = tl.load(pair).to(tl.int64) * block_words
    destination = tl.load(pair + 1).to(tl.int64) * block_words
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < block_words
    tl.store(words_ptr + destination + word, tl.load(words_ptr + source + word, inside), inside)
