"""One layer of the KV cache as the kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.formats.kv_format import FP12, KVFormat


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Strided views of one layer of the cache.

    kv [num_blocks, 2, kv_heads, block_size, head_dim], or of planes [..., 3, head_dim/2]; 2 is keys, values,
    or [num_blocks, 1, …] with `latent`: so many of a key's first numbers are its value then.
    scales [num_blocks, kv_heads, block_size, 2] fp16 if the format is scaled, else None. dequantized
    [num_blocks, 2, kv_heads, block_size, head_dim] or None: room for one layer's keys and values of a cache
    in fp12 as numbers, the same for all layers. index: keys by which an indexer chooses tokens, as latents
    that are all value, or None.
    """

    kv: Tensor
    format: KVFormat
    scales: Tensor | None = None
    dequantized: Tensor | None = None
    latent: int = 0
    index: LayerCache | None = None

    @property
    def kv_heads(self) -> int:
        return self.kv.shape[2]

    @property
    def block_size(self) -> int:
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        return self.kv.shape[-1] * 2 if self.format.planes else self.kv.shape[-1]

    def read(self, index: tuple[Tensor, ...]) -> Tensor:
        """Return kv[index] in fp32 [..., block size, D]; index is (blocks, parts, kv heads)."""
        if self.scales is None:
            return self.kv[index].float()
        blocks, parts, heads = index
        scales = self.scales[blocks, heads, :, parts]
        return self.format.dequantize(self.kv.view(torch.uint8)[index], scales)

    def check(self) -> None:
        """Raise ValueError unless the tensors are what the format says, laid out as the kernels read it."""
        kv, scales = self.kv, self.scales
        if kv.dtype != self.format.dtype:
            raise ValueError(f"a cache in {self.format.name} is of {self.format.dtype}, not of {kv.dtype}")
        if kv.shape[1] != (1 if self.latent else 2) or (self.latent and self.format.scaled):
            raise ValueError(
                f"a cache of {kv.shape[1]} vectors of a head in {self.format.name} is none with a latent of "
                f"{self.latent}: that is one vector in the model's own dtype, and without one there are 2"
            )
        if self.format.scaled != (scales is not None):
            raise ValueError(
                f"a cache in {self.format.name} comes {'without' if scales is None else 'with'} scales"
            )
        if scales is not None:
            expected = (kv.shape[0], *kv.shape[2:4], 2)
            if scales.shape != expected or scales.dtype != torch.float16 or self.head_dim % 2:
                raise ValueError(
                    f"scales must be fp16 of shape {expected} and head dims even, got {scales.dtype} of "
                    f"{tuple(scales.shape)} and head dim {self.head_dim}"
                )
        if planes := self.format.planes:
            strides = self.head_dim // 2, kv.shape[3] * self.head_dim // 2, 1
            if kv.dim() != 6 or kv.shape[4] != planes or kv.stride()[3:] != strides:
                raise ValueError(
                    f"planes must be [blocks, 2, Hkv, block_size, 3, D/2] with strides {strides} in the end, "
                    f"got {tuple(kv.shape)} and {kv.stride()}; see KVFormat.vectors"
                )

    def check_dequantized(self) -> None:
        """Raise ValueError unless `dequantized` is room for an fp12 cache's numbers, or None."""
        dequantized = self.dequantized
        if dequantized is None:
            return
        shape = (*self.kv.shape[:4], self.head_dim)
        if self.format != FP12 or dequantized.shape != shape or not dequantized.is_contiguous():
            raise ValueError(
                f"a cache in {self.format.name} of {tuple(self.kv.shape)} does not dequantize into "
                f"{dequantized.dtype} of {tuple(dequantized.shape)}; that is for one in {FP12.name}, and "
                f"takes a contiguous tensor of shape {shape}"
            )
