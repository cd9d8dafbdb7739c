"""How kernels that run one after the other are launched."""

from __future__ import annotations

from functools import cache

import torch

FIRST_CAPABILITY = (9, 0)  # Hopper


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that takes DEPENDENT: let it begin before the kernel ahead has ended.

    (Programmatic dependent launch.) If DEPENDENT, it must call `gdc_wait` before it reads what another
    kernel wrote or writes anything at all.
    """
    if _has_dependent_launch(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
