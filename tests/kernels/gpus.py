"""GPUs as their makers describe them, by compute capability."""

from __future__ import annotations

from quire.kernels.gpu import KNOWN

GPUS = {10 * gpu.capability[0] + gpu.capability[1]: gpu for gpu in KNOWN.values()}
