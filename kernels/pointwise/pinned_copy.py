"""Copies a step's words between the device and pinned host memory by a kernel.

A GPU has one copy engine for each direction, which takes one copy after the other, whatever their streams:
results would wait for the KV blocks that are on their way to the host, and the next step for the results. A
block of 2 MB takes 40 to 90 µs on an H100, and dozens may leave in a step: spilled ones, a swapped group's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024  # 32-bit words that one program copies


def copy_pinned(target: Tensor, source: Tensor) -> None:
    """Copy source to target, both [N] i32 and contiguous, in stream order.

    Either may be in pinned host memory; its owner keeps it until the stream has come so far.
    """
    for tensor in (target, source):
        if tensor.shape != (len(source),) or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"copy_pinned needs two contiguous tensors [{len(source)}] of int32, got one "
                f"{list(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}"
            )
    words = len(target)
    if words:
        copy_kernel[(triton.cdiv(words, WORDS),)](target, source, words, WORDS)


@triton.jit(do_not_specialize=["words"])
def copy_kernel(target_ptr: tl.tensor, source_ptr: tl.tensor, words: tl.tensor, WORDS: tl.constexpr) -> None:
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    tl.store(target_ptr + word, tl.load(source_ptr + word, inside), inside)
