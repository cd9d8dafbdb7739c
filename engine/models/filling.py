"""Fills places of a model with tensors of files, or with a rank's share of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.engine.models.copies import Copy
from quire.engine.models.doubts import Doubts
from quire.engine.models.weights import Place
from quire.engine.parallel.share import Share
from quire.kernels.quantised.weight import QuantisedWeight

_KEPT_AT_ONCE = 1 << 24  # numbers that are read at once of a weight that is kept in few bits


def fill(place: Place, file: Any, name: str, share: Share | None, copy: Copy) -> None:
    """Copy a tensor of the file, or only a share of it, to its place."""
    if isinstance(place, QuantisedWeight):
        fill_kept(place, file.get_slice(name), share)
        return
    if share is None:
        copy(place, file.get_tensor(name))
        return
    whole, offset = file.get_slice(name), 0
    for begin, end in share.ranges:
        part = whole[begin:end] if share.dim == 0 else whole[:, begin:end]
        copy(place.narrow(share.dim, offset, end - begin), part)
        offset += end - begin


def holds(place: Place, file: Any, name: str, share: Share | None, copy: Copy) -> bool:
    """Tell whether a place has the numbers that a tensor of the file has."""
    assert isinstance(place, Tensor)  # an embedding
    other = torch.empty_like(place)
    fill(other, file, name, share, copy)
    return torch.equal(other, place)


def fill_kept(place: QuantisedWeight, tensor: Any, share: Share | None) -> None:
    """Copy what a tensor, or a share of it, has of codes and scales. Raises ValueError by name."""
    outputs, inputs = place.shape
    ranges = share.ranges if share is not None and share.dim == 0 else ((0, outputs),)
    columns = share.ranges[0] if share is not None and share.dim == 1 else (0, inputs)
    step, offset, doubts = max(_KEPT_AT_ONCE // inputs, 1), 0, Doubts()
    for begin, end in ranges:
        for first in range(begin, end, step):
            last = min(first + step, end)
            place.rows(offset, offset + last - first).fill(tensor.numbers((first, last), columns, doubts))
            offset += last - first
    doubts.settle()
