"""Which weights of few bits a device's kernels multiply by."""

from __future__ import annotations

import torch

from quire.kernels.quantised.weight import WeightFormat


def keeps(form: WeightFormat, dtype: torch.dtype) -> bool:
    """Tell whether kernels of a GPU multiply numbers of a dtype by weights that are kept so."""
    return dtype in (torch.bfloat16, torch.float16)


def keeps_none(form: WeightFormat, dtype: torch.dtype) -> bool:
    """Tell the same of plain torch, which multiplies by numbers of the dtype alone."""
    return False
