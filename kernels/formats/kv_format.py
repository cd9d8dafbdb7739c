"""The formats that a cache may hold keys and values in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.formats import fp8, fp12
from quire.kernels.formats.kv_scales import SCALE_TYPE


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a cache holds a key or a value, a vector of D numbers.

    name: as `--kv-cache-dtype` and `--dtype` have it. dtype: of the elements in memory. scaled: each vector
    has a scale (`formats.kv_scales`). planes: pieces of D/2 bytes that a vector is divided into
    (`formats.fp12`); 0 is a vector of D elements in one piece. written_by_decode: decode attention can write
    the newest tokens' vectors itself, not only `attention.write_kv`.
    """

    name: str
    dtype: torch.dtype
    scaled: bool = False
    planes: int = 0
    written_by_decode: bool = True

    def elements(self, head_dim: int) -> int:
        """Return how many elements a vector takes. Raises ValueError for head dims that it does not suit."""
        return fp12.vector_bytes(head_dim) if self.planes else head_dim

    def vector_bytes(self, head_dim: int) -> int:
        """Return the bytes of a vector and its scale. Raises ValueError as `elements` does."""
        scale = SCALE_TYPE.itemsize if self.scaled else 0
        return self.elements(head_dim) * self.dtype.itemsize + scale

    def vectors(self, memory: Tensor, block_size: int, head_dim: int) -> Tensor:
        """View memory [..., block_size · elements] of one head's block as its vectors.

        They are [..., block_size, D], or strided planes [..., block_size, 3, D/2].
        """
        if self.planes:
            return memory.unflatten(-1, (self.planes, block_size, head_dim // 2)).transpose(-3, -2)
        return memory.unflatten(-1, (block_size, head_dim))

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round x [..., D] -> (vectors [..., D] or planes [..., 3, D/2], scales [...] fp16)."""
        return fp12.quantize(x) if self.planes else fp8.quantize(x)

    def dequantize(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return [..., D] fp32 of what `quantize` gave."""
        if self.planes:
            return fp12.dequantize(values, scales)
        return fp8.dequantize(values.view(torch.uint8), scales)


BF16 = KVFormat("bfloat16", torch.bfloat16)
FP16 = KVFormat("float16", torch.float16)
FP32 = KVFormat("float32", torch.float32)
FP8 = KVFormat("fp8_e4m3", torch.float8_e4m3fn, scaled=True, written_by_decode=False)
FP12 = KVFormat("fp12_e4m7", torch.uint8, scaled=True, planes=3)

UNSCALED = {each.dtype: each for each in (BF16, FP16, FP32)}  # by the dtype that a model computes in
SCALED = {each.name: each for each in (FP8, FP12)}  # by --kv-cache-dtype
