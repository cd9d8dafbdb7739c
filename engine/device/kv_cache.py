"""The KV cache's memory: one tensor, a block being one contiguous region of it across a group's layers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.allocation import gib, refused_where_too_large
from quire.engine.arrays import Int32
from quire.engine.device.choice import memory_of
from quire.engine.models.config import ModelConfig
from quire.kernels.attention.hopper_decode import decode as hopper_decode
from quire.kernels.attention.hopper_prefill import prefill as hopper_prefill
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.kv_format import FP8, FP12, SCALED, UNSCALED, KVFormat
from quire.kernels.formats.kv_scales import SCALE_TYPE
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.formats.state_cache import StateCache
from quire.kernels.formats.state_spec import ALIGNMENT, LayerStates
from quire.kernels.gpu import NO_GPU, Gpu

# Query heads of a kv head with which fp12 is clearly quicker than the model's own type. Of 6, 7 and 12, many
# rows gain 3 to 5 %, and one row and prompts lose a little; others were not timed.
_QUICKER_GROUPS = (1, 2, 4, 8)


def bytes_per_block(config: ModelConfig, block_size: int, held: KVFormat) -> int:
    """Return the bytes that `block_size` tokens take in a cache group: keys and values, then their scales.

    That is over all layers where there is one group; else every group's block has room for the largest, and
    for the states of one. Raises ValueError for a head dim that does not suit the format.
    """
    sizes = [
        sum(part.vectors * part.heads * block_size * held.vector_bytes(part.head_dim) for part in spec.parts)
        for spec in config.cache_specs
    ]
    if not config.states:
        return max(sum(sizes[layer] for layer in group.layers) for group in config.cache_groups)
    states = [states.num_bytes for states in config.states]
    most = max(
        sum((states if group.states else sizes)[layer] for layer in group.layers)
        for group in config.cache_groups
    )
    return -(-most // ALIGNMENT) * ALIGNMENT


def dequantized_dtype(
    config: ModelConfig, held: KVFormat, dtype: torch.dtype, gpu: Gpu, block_size: int = 16
) -> torch.dtype | None:
    """Return the dtype that prefill attention of a model in dtype has a cache dequantized to, if it has.

    That is worth its memory where `quire.kernels.attention.hopper_prefill.prefill` takes heads and blocks,
    and fp12 is as exact as bf16.
    """
    group, full = config.largest_group, not all(config.windows)
    dequantizes = (
        config.plain
        and full
        and hopper_prefill.dequantizes(gpu, dtype, held, config.head_dim, group, block_size)
    )
    return dtype if dequantizes else None


def automatic_format(config: ModelConfig, dtype: torch.dtype, gpu: Gpu, block_size: int = 16) -> KVFormat:
    """Return the format that `--kv-cache-dtype auto` has keys and values of a model in dtype held in.

    That is fp12 where Hopper's prefill attention takes what it is dequantized to (see `dequantized_dtype`)
    and `quire.kernels.attention.hopper_decode.decode` its planes: elsewhere it would be slower than dtype
    itself. Models with groups of other sizes keep theirs; nor is it of use in those of so few layers
    that with one of them dequantized they take as much memory.
    """
    dequantized = dequantized_dtype(config, FP12, dtype, gpu, block_size)
    group = config.largest_group
    takes = hopper_decode.takes_heads(gpu, dtype, config.head_dim, group, block_size)
    if dequantized is None or not takes or group not in _QUICKER_GROUPS:
        return UNSCALED[dtype]
    taken = bytes_per_block(config, 1, FP12) + dequantized_bytes_per_block(config, 1, dequantized)
    return FP12 if taken < bytes_per_block(config, 1, UNSCALED[dtype]) else UNSCALED[dtype]


def named_format(
    name: str, model: ModelConfig, dtype: torch.dtype, gpu: Gpu, block_size: int = 16
) -> KVFormat:
    """Return the format that `--kv-cache-dtype` names for a model in dtype.

    Raises ValueError where it does not suit the device or the model.
    """
    if name == "auto":
        return automatic_format(model, dtype, gpu, block_size)
    if name == "model":
        return UNSCALED[dtype]
    unsuited = {other: _why_unsuited(held, model, gpu) for other, held in SCALED.items()}
    if (why := unsuited[name]) is not None:
        others = [f"give {other}, or " for other, reason in unsuited.items() if reason is None]
        raise ValueError(f"--kv-cache-dtype: {why}; {''.join(others)}leave it out")
    return SCALED[name]


def _why_unsuited(held: KVFormat, model: ModelConfig, gpu: Gpu) -> str | None:
    if not model.cache_specs:
        return f"{held.name} is for keys and values, and all layers of the model keep states"
    if any(spec.latent for spec in model.cache_specs):
        return f"{held.name} is not for a model that keeps latents, which take less as they are"
    if any(spec.index for spec in model.cache_specs):
        return f"{held.name} is not for a model whose tokens an indexer chooses, by keys as they are"
    if any(each.biased for each in model.attention):
        return f"{held.name} is not for a model whose keys hold what is added to scores, which it would round"
    if held == FP8 and gpu is not NO_GPU and not gpu.has_e4m3:
        return f"fp8_e4m3 needs a GPU of compute capability 8.9 or later, but {gpu.name} is older"
    try:
        for spec in model.cache_specs:
            held.elements(spec.head_dim)
    except ValueError as error:
        return str(error)
    return None


def dequantized_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype | None) -> int:
    """Return bytes of a block in `LayerCache.dequantized` of a dtype; 0 with None."""
    return 0 if dtype is None else 2 * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


class _View(NamedTuple):
    """A layer's vectors in all blocks, and their scales if the format has any."""

    kv: Tensor
    scales: Tensor | None


class KVCache:
    """`blocks` is [num_blocks, bytes_per_block] u8, and `layers` are views of it, but for `dequantized`.

    A block is of one cache group at a time, and the first layers of all groups are views of the same bytes.
    `states` are views of it, too, of the layers that keep some, and of a block beside those.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        held: KVFormat,
        device: torch.device,
        copy_blocks: Callable[[Tensor, Tensor], None],
        dequantized_dtype: torch.dtype | None = None,
    ) -> None:
        """Raises ValueError with the numbers where there is no memory for so many blocks."""
        block_bytes = bytes_per_block(config, block_size, held)
        dequantized_bytes = dequantized_bytes_per_block(config, block_size, dequantized_dtype)
        num_bytes = num_blocks * (block_bytes + dequantized_bytes)
        room = refused_where_too_large(
            f"{num_blocks:,} KV blocks take {gib(num_bytes)}",
            "--num-gpu-blocks-override or --kv-cache-memory-bytes",
            partial(memory_of, device),
            host_bytes=num_bytes if device.type == "cpu" else 0,
        )
        dequantized = None
        with room:
            # Never cleared: a slot is read only after it was written, and untouched pages cost a CPU nothing.
            spare = 1 if config.states else 0  # where rows that pad have their states
            memory = torch.empty(num_blocks + spare, block_bytes, dtype=torch.uint8, device=device)
            self.blocks = memory[:num_blocks]
            if dequantized_dtype is not None:  # all layers' heads are alike
                shape = num_blocks, 2, config.num_kv_heads, block_size, config.head_dim
                dequantized = torch.empty(shape, dtype=dequantized_dtype, device=device)
        self.block_size = block_size
        self.host: Tensor | None = None  # the same blocks in pinned host memory
        self._copy_blocks = copy_blocks
        specs = config.cache_specs
        views: dict[int, list[_View]] = {}
        for group in config.cache_groups:
            if group.states:
                continue
            each = iter(self._views([part for at in group.layers for part in specs[at].parts], held))
            views |= {at: list(islice(each, len(specs[at].parts))) for at in group.layers}
        # Attention with a window reads the cache itself.
        self.layers = [
            LayerCache(
                views[layer][0].kv,
                held,
                views[layer][0].scales,
                None if spec.window else dequantized,
                spec.latent,
                LayerCache(views[layer][1].kv, held, latent=spec.index) if spec.index else None,
            )
            for layer, spec in enumerate(specs)
        ]
        kept: dict[int, list[Tensor]] = {}
        for group in config.cache_groups:
            if group.states:
                kept |= _state_views(memory, {at: config.states[at] for at in group.layers})
        self.states: StateCache | None = None
        if kept:
            self.states = StateCache([kept[layer] for layer in range(len(config.states))], block_size)

    def _views(self, specs: list[CacheSpec], held: KVFormat) -> list[_View]:
        """Return the views of parts of a group's layers: their vectors come first, and then their scales."""
        block_size = self.block_size
        places = np.cumsum([0, *(_vectors(spec, block_size, held) for spec in specs)]).tolist()
        kv = [
            held.vectors(
                self.blocks[:, begin:end].view(held.dtype).unflatten(1, (spec.vectors, spec.heads, -1)),
                block_size,
                spec.head_dim,
            )
            for spec, begin, end in zip(specs, places, places[1:], strict=False)
        ]
        if not held.scaled:
            return [_View(vectors, None) for vectors in kv]
        sizes = [spec.heads * block_size * 2 for spec in specs]
        behind = self.blocks[:, places[-1] :].view(SCALE_TYPE)[:, : sum(sizes)].split(sizes, dim=1)
        return [
            _View(vectors, part.unflatten(1, (spec.heads, block_size, 2)))
            for vectors, part, spec in zip(kv, behind, specs, strict=True)
        ]

    def add_host_tier(self, num_blocks: int) -> None:
        """Take host memory for `num_blocks` blocks, pinned where the device is a GPU."""
        shape = num_blocks, self.blocks.shape[1]
        num_bytes = num_blocks * shape[1]
        told = f"{num_blocks:,} KV blocks in host memory take {gib(num_bytes)}"
        with refused_where_too_large(told, "--swap-space", host_bytes=num_bytes):
            self.host = touched(shape) if self.blocks.is_cuda else torch.empty(shape, dtype=torch.uint8)
        if self.blocks.is_cuda:
            _pin_while(self, self.host)

    def swap(self, out: Int32, back: Int32) -> None:
        """Copy (device, host) blocks out and (host, device) blocks back, in stream order."""
        assert self.host is not None
        for device, host in _runs(out):
            self.host[host].copy_(self.blocks[device], non_blocking=True)
        for host, device in _runs(back):
            self.blocks[device].copy_(self.host[host], non_blocking=True)

    def copy(self, pairs: Tensor) -> None:
        """Copy whole blocks, pairs [C, 2] of (source, destination) on the device, in one launch."""
        self._copy_blocks(self.blocks, pairs)


def _state_views(memory: Tensor, layers: dict[int, LayerStates]) -> dict[int, list[Tensor]]:
    """Return the states of each of a group's layers in all blocks of `memory`, [blocks, …] each."""
    views: dict[int, list[Tensor]] = {}
    begin = 0
    for at, layer in layers.items():
        views[at] = []
        for part in layer.parts:
            dtype: torch.dtype = getattr(torch, part.dtype)
            numbers = memory[:, begin : begin + part.num_bytes].view(dtype)[:, : prod(part.shape)]
            views[at].append(numbers.unflatten(1, part.shape))
            begin += part.num_bytes
    return views


def _vectors(spec: CacheSpec, block_size: int, held: KVFormat) -> int:
    """Return the bytes of a layer's vectors in a block, without scales."""
    return spec.vectors * spec.heads * block_size * held.elements(spec.head_dim) * held.dtype.itemsize


def touched(shape: tuple[int, ...]) -> Tensor:
    """Return bytes that are zero, written by a thread for each processor, however few are to compute.

    Pages that many threads have touched are quickly pinned: 4 GiB in 0.6 s, by torch in 2.3.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        return torch.zeros(shape, dtype=torch.uint8)
    finally:
        torch.set_num_threads(threads)


def _pin_while(owner: object, memory: Tensor) -> None:
    """Keep `memory`, and keep it in place, while its `owner` is there. Raises ValueError if CUDA cannot."""
    cudart: Any = torch.cuda.cudart()
    error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error != cudart.cudaError.success:
        raise ValueError(
            f"CUDA cannot pin {memory.nbytes / 2**30:.1f} GiB of host memory for KV blocks: "
            f"{cudart.cudaGetErrorString(error)}; lower --swap-space, or give 0 for none"
        )

    def unpin(memory: Tensor) -> None:
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(memory.data_ptr())

    weakref.finalize(owner, unpin, memory).atexit = False


def _runs(pairs: Int32) -> Iterator[tuple[slice, slice]]:
    """Return the same pairs [N, 2] as slices: blocks that follow each other on both sides make one copy."""
    ends = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    for run in np.split(pairs, ends) if len(pairs) else []:
        (source, destination), count = run[0].tolist(), len(run)
        yield slice(source, source + count), slice(destination, destination + count)
