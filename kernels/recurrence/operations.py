"""The operations of layers that keep states, as one value; the functions' own docstrings give shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Recurrences:
    convolve: Callable[..., Tensor]
    gated_delta_rule: Callable[..., Tensor]
    state_space_scan: Callable[..., Tensor]
    selective_scan: Callable[..., Tensor]
