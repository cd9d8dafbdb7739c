"""What ranks decide about a model together: each of them sees its own heads only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from quire.kernels.parallel.ranks import Ranks

# Tells whether something is so on all ranks, which all ask it in the same order.
Agree: TypeAlias = Callable[[bool], bool]


def agreement(ranks: Ranks | None, device: torch.device) -> Agree:
    """Return what tells ranks whether something is so on all of them; alone, whether it is so."""
    if ranks is None:
        return bool
    return lambda found: bool(ranks.all_gather(torch.full((1, 1), float(found), device=device)).all())
