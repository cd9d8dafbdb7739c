"""GPUs as their makers describe them, by compute capability: the first that is known of each."""

from __future__ import annotations

from quire.kernels.gpu import KNOWN, Gpu

GPUS: dict[int, Gpu] = {}
for known in KNOWN.values():
    GPUS.setdefault(10 * known.capability[0] + known.capability[1], known)
