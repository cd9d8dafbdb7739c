"""The order in which kernels read the codes of a weight, and back.

The tensor cores' first operand of 16 rows and 16 columns has in a thread, of four that share a row, two
columns next to each other and two that are 8 further. So of 64 columns each thread's 16 stand next to each
other, to be read at once; and in a word of four bytes those, of which an instruction makes pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LANES, _STEPS = 4, 4  # threads that share a row, and products of 16 columns in 64


def in_order_of_products(codes: Tensor) -> Tensor:
    """Order bytes [outputs, inputs] as kernels read them: in 64 inputs by thread, step, and within a word."""
    lines = codes.unflatten(1, (-1, _STEPS, 2, _LANES, 2))  # step, eight further, thread, beside
    return lines.permute(0, 1, 4, 2, 5, 3).flatten(1)


def in_order_of_inputs(codes: Tensor) -> Tensor:
    """Return bytes as they were before `in_order_of_products`."""
    parts = _words_in_order(codes).view(torch.uint8)
    return torch.stack((parts[..., ::2], parts[..., 1::2]), 3).flatten(1)


def pairs_in_order(codes: Tensor) -> Tensor:
    """Order codes of 4 bits [outputs, inputs] -> bytes [outputs, inputs / 2], in 128 inputs alike.

    A byte has two that are 8 inputs apart, and words those of two times 64 inputs.
    """
    lines = codes.unflatten(1, (-1, 2, _STEPS, 2, _LANES, 2))  # half, step, eight further, thread, beside
    low, high = lines.permute(0, 1, 5, 3, 6, 2, 4).unbind(-1)
    return (low | high << 4).flatten(1)


def pairs_in_order_of_inputs(codes: Tensor) -> Tensor:
    """Return codes of 4 bits as they were before `pairs_in_order`."""
    parts = _words_in_order(codes).view(torch.uint8)
    halves = [torch.stack((half & 15, half >> 4), 3) for half in (parts[..., ::2], parts[..., 1::2])]
    return torch.stack(halves, 2).flatten(1)


def _words_in_order(codes: Tensor) -> Tensor:
    """Order words of four bytes [outputs, words] by step and thread: several times as fast as bytes."""
    words = codes.view(torch.int32).unflatten(1, (-1, _LANES, _STEPS))
    return words.transpose(2, 3).clone(memory_format=torch.contiguous_format)
