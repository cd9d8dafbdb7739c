"""GPUs as their makers describe them, by compute capability."""

from __future__ import annotations

from quire.kernels.gpu import Gpu

# Bytes that a program may have, and multiprocessors: of an A100, an A10, an L4, an H100, a B200, an RTX 5090.
GPUS = {
    80: Gpu("A100", (8, 0), 166912, 108),
    86: Gpu("A10", (8, 6), 101376, 72),
    89: Gpu("L4", (8, 9), 101376, 58),
    90: Gpu("H100", (9, 0), 232448, 132),
    100: Gpu("B200", (10, 0), 232448, 148),
    120: Gpu("RTX 5090", (12, 0), 101376, 170),
}
