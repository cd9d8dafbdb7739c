"""A GPU as the choice of kernels sees it: features and limits, asked of the device once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

LARGEST_HBM3 = 96 << 30  # bytes: of a GH200 and an H20; an H100 has less
FIRST_CAPABILITY = (8, 0)  # Ampere: asynchronous copies, and products of bf16


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernels may use of a GPU.

    capability is CUDA's compute capability, shared_memory the bytes that one program may have at most,
    multiprocessors how many there are, memory all its bytes, 0 if it is not known.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    memory: int = 0

    @property
    def has_kernels(self) -> bool:
        """Return whether kernels run there; elsewhere torch computes everything."""
        return self.capability >= FIRST_CAPABILITY

    @property
    def has_e4m3(self) -> bool:
        """Return whether Triton has fp8 numbers of four bits of exponent: from Ada on."""
        return self.capability >= (8, 9)

    @property
    def has_dependent_launch(self) -> bool:
        """Return whether a kernel may begin before the one ahead has ended: from Hopper on."""
        return self.capability >= (9, 0)

    @property
    def has_warpgroup_products(self) -> bool:
        """Return whether four warps multiply together (wgmma): Hopper's only; Blackwell has others."""
        return self.capability[0] == 9

    @property
    def has_quick_memory(self) -> bool:
        """Return whether memory is Hopper's second, HBM3e, 1.4 times as fast: an H200's, of 141 GB."""
        return self.capability == (9, 0) and self.memory > LARGEST_HBM3

    @property
    def has_products_of_shared_memory(self) -> bool:
        """Whether Triton multiplies large tiles from shared memory: by wgmma, and by tcgen05 of data centres'
        Blackwell."""
        return (9, 0) <= self.capability < (11, 0)


# A CPU runs the kernels in Triton's interpreter, which bounds no shared memory.
NO_GPU = Gpu("cpu", (0, 0), sys.maxsize, 1)


# As their makers describe them: bytes that a program may have, multiprocessors, and memory where kernels
# differ by that.
KNOWN = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", (8, 0), 166912, 108),
        Gpu("A10", (8, 6), 101376, 72),
        Gpu("L4", (8, 9), 101376, 58),
        Gpu("H100", (9, 0), 232448, 132),
        Gpu("H200", (9, 0), 232448, 132, 141 * 10**9),
        Gpu("B200", (10, 0), 232448, 148),
        Gpu("RTX 5090", (12, 0), 101376, 170),
    )
}


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the description of a CUDA device, or NO_GPU for any other device."""
    if device.type != "cuda":
        return NO_GPU
    found: Any = torch.cuda.get_device_properties(device)  # torch's types leave out what is opted into
    return Gpu(
        found.name,
        (found.major, found.minor),
        found.shared_memory_per_block_optin,
        found.multi_processor_count,
        found.total_memory,
    )
