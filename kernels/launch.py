"""How kernels that run one after the other are launched, and on how many multiprocessors."""

from __future__ import annotations

from functools import cache

import torch

FIRST_CAPABILITY = (9, 0)  # Hopper


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


@cache
def multiprocessors_of(device: torch.device) -> int:
    """How many a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that takes DEPENDENT: let it begin before the kernel ahead has ended.

    (Programmatic dependent launch.) If DEPENDENT, it says by `gdc_launch_dependents` when the next kernel may
    begin, mostly at once, and by `gdc_wait` waits until all kernels ahead have ended. It must do so before it
    reads or overwrites anything that they may still use: that the kernel just ahead leaves it alone is not
    enough, since the one before that may still run. And of each grid at least one program must wait before it
    exits: who waits for this grid relies on all before it having ended, too.
    """
    if _has_dependent_launch(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
