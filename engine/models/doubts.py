"""Parts of weights whose numbers may not be finite, as the device has yet to tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.engine.parallel.share import Range
from quire.kernels.quantised.weight import Numbers

_MOST_INTEGER = 15.0  # by which scales are multiplied, whatever the zero point


class Doubts:
    """Notes of parts that were read as they can be kept; the host waits for the device once for them all."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Any, Range, Range]] = []

    def note(self, numbers: Numbers, tensor: Any, outputs: Range, inputs: Range, dtype: torch.dtype) -> None:
        """Note what was read of a tensor, which itself refuses to be read as numbers that a dtype has not."""
        self._noted.append((_may_be_infinite(numbers, dtype), tensor, outputs, inputs))

    def settle(self) -> None:
        """Wait for what was noted. Raise ValueError by name for numbers that are not finite."""
        noted, self._noted = self._noted, []
        found = torch.stack([each for each, *_ in noted]).tolist() if noted else []
        for is_so, (_, tensor, outputs, inputs) in zip(found, noted, strict=True):
            if is_so:
                tensor[slice(*outputs), slice(*inputs)]  # which raises by name, or finds that they are


def _may_be_infinite(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    """Return [] bool: whether products of codes and scales may be no numbers of a dtype, by their sizes."""
    codes, largest = numbers.codes, numbers.scales.float().abs().max()
    floats = codes.is_floating_point()
    most = torch.finfo(codes.dtype).max if floats else _MOST_INTEGER
    fits = largest * most <= torch.finfo(dtype).max  # nor if it is NaN
    return ~(fits & ~codes.float().isnan().any()) if floats else ~fits
