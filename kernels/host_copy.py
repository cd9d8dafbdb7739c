"""Words between the device and the host's pinned memory, copied by a kernel.

A transfer by the copy engine is quick, but the kernels before and behind it wait for it to begin and to end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words of a program


def copy_words(target: Tensor, source: Tensor) -> None:
    """target [N] i32 = source [N] i32, both contiguous, in stream order; one may be in pinned host memory.

    Who owns that memory keeps it and leaves it alone until the copy is done: torch's allocator does not know.
    """
    if target.shape != source.shape or target.dtype != torch.int32 or source.dtype != torch.int32:
        raise ValueError(
            f"as many int32 words are needed on both sides, got {target.shape} of {target.dtype} for "
            f"{source.shape} of {source.dtype}"
        )
    count = len(source)
    if count:
        _copy_words_kernel[(triton.cdiv(count, BLOCK),)](target, source, count, BLOCK, num_warps=4)


def copy_words_reference(target: Tensor, source: Tensor) -> None:
    """The same as `copy_words` in plain torch."""
    target.copy_(source, non_blocking=True)


@triton.jit(do_not_specialize=["count"])
def _copy_words_kernel(target: tl.tensor, source: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < count
    tl.store(target + word, tl.load(source + word, inside), inside)
