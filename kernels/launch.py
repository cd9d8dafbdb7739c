"""How kernels that run one after the other are launched."""

from __future__ import annotations

import torch

from quire.kernels.gpu import gpu_of


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that takes DEPENDENT: let it begin before the kernel ahead has ended.

    (Programmatic dependent launch.) If DEPENDENT, it says by `gdc_launch_dependents` when the next kernel may
    begin, mostly at once, and by `gdc_wait` waits until all kernels ahead have ended. It must do so before it
    reads or overwrites anything that they may still use: that the kernel just ahead leaves it alone is not
    enough, since the one before that may still run. And of each grid at least one program must wait before it
    exits: who waits for this grid relies on all before it having ended, too.

    READS_EARLY beside a kernel names the arguments whose memory it reads before it waits: it must have been
    complete when the kernel just ahead began. A test finds them in the compiled code.
    """
    if gpu_of(device).has_dependent_launch:
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
