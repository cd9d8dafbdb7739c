"""The operations of layers that keep states, as one value; the functions' own docstrings give shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.recurrence.convolution import convolve, convolve_reference
from quire.kernels.recurrence.decode_blocks import decode_blocks, decode_blocks_reference
from quire.kernels.recurrence.delta_net import delta_net, delta_net_reference
from quire.kernels.recurrence.delta_rule import gated_delta_rule, gated_delta_rule_reference
from quire.kernels.recurrence.selective_scan import selective_scan, selective_scan_reference
from quire.kernels.recurrence.state_space import state_space_scan, state_space_scan_reference


@dataclass(frozen=True, slots=True)
class Recurrences:
    decode_blocks: Callable[..., tuple[Tensor, Tensor]]
    convolve: Callable[..., Tensor]
    delta_net: Callable[..., Tensor]
    gated_delta_rule: Callable[..., Tensor]
    state_space_scan: Callable[..., Tensor]
    selective_scan: Callable[..., Tensor]


KERNELS = Recurrences(decode_blocks, convolve, delta_net, gated_delta_rule, state_space_scan, selective_scan)
REFERENCES = Recurrences(
    decode_blocks_reference,
    convolve_reference,
    delta_net_reference,
    gated_delta_rule_reference,
    state_space_scan_reference,
    selective_scan_reference,
)
