"""Copies a step's few words between the device and pinned host memory by a kernel.

A GPU has one copy engine for each direction, which takes one copy after the other, whatever their streams:
results would wait for all KV blocks that are on their way to the host, and the next step for the results. A
block takes 40 to 90 µs on an H100, and there may be hundreds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024  # 32-bit words that one program copies


def copy_pinned(target: Tensor, source: Tensor) -> None:
    """target = source, both [N] i32 and contiguous, in stream order.

    Either may be in pinned host memory; its owner keeps it until the stream has come so far.
    """
    if target.shape != source.shape or not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError(
            f"copy_pinned needs contiguous tensors of one length, got shapes {tuple(target.shape)} and "
            f"{tuple(source.shape)}, strides {target.stride()} and {source.stride()}"
        )
    words = len(target)
    if words:
        copy_kernel[(triton.cdiv(words, WORDS),)](target, source, words, WORDS)


@triton.jit(do_not_specialize=["words"])
def copy_kernel(target_ptr: tl.tensor, source_ptr: tl.tensor, words: tl.tensor, WORDS: tl.constexpr) -> None:
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    tl.store(target_ptr + word, tl.load(source_ptr + word, inside), inside)
