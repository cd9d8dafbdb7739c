"""SwiGLU's activation (Shazeer 2020): SiLU of the gate times the up projection."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I]; the SiLU is rounded to the dtype first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
