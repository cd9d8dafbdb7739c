"""Fig. 18a: what it costs the attention kernel of a decode that keys and values lie in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, DecodeBatch
from quire.kernels.attention.decode import decode
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.formats.layer_cache import LayerCache
from quire.loadtest.device_time import device_seconds

BATCHES = (8, 32)
CONTEXTS = (64, 128, 256, 512, 1024)
HEADS = {"OPT-13B": (40, 40), "Llama-8B": (32, 8)}  # of queries; of keys and values
HEAD_DIM = 128
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of blocks
SIZE_HEADS, SIZE_BATCH, SIZE_CONTEXT = "OPT-13B", 32, 512  # about what a batch of ShareGPT's requests has
WORKING_SET = 200 << 20  # bytes: four times an H100's L2 cache
MAX_SETS = 40


class AttentionTime(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one call: our kernel over scattered blocks of 16 and of 128, over blocks of 128 that
    lie one after the other (contiguous up to a context of 128), and torch's attention over contiguous keys.
    `max_error`: the largest difference of a way to fp64 attention."""

    heads: str
    batch: int
    context: int
    microseconds: dict[str, float]
    max_error: dict[str, float]


class BlockSizeTime(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one call of our kernel over scattered blocks; its largest difference to fp64."""

    block_size: int
    microseconds: float
    max_error: float


@dataclass(frozen=True, slots=True)
class _Set:
    """One layer's memory. kv [batch, 2, kv heads, context, D] is contiguous; blocks hold the same."""

    q: Tensor  # [batch, q heads, D]
    kv: Tensor
    out: Tensor


def measure_attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: str,
    batch: int,
    context: int,
) -> AttentionTime:
    sets = _sets(device, dtype, heads, batch, context)
    paged = partial(_paged, _workspace(sets[0]))
    ways: dict[str, list[Callable[[], Tensor]]] = {
        "blocks of 16": [paged(one, 16, scattered=True) for one in sets],
        "blocks of 128": [paged(one, 128, scattered=True) for one in sets],
        "blocks of 128 in order": [paged(one, 128, scattered=False) for one in sets],
        "torch, contiguous": [_contiguous(one) for one in sets],
    }
    exact = _exact(sets[0])
    return AttentionTime(
        heads=heads,
        batch=batch,
        context=context,
        microseconds={way: 1e6 * device_seconds([*calls], device) for way, calls in ways.items()},
        max_error={way: (calls[0]().double() - exact).abs().max().item() for way, calls in ways.items()},
    )


def measure_block_size(device: torch.device, dtype: torch.dtype, block_size: int) -> BlockSizeTime:
    """Time the kernel with blocks of a size: part of what Fig. 18b shows."""
    sets = _sets(device, dtype, SIZE_HEADS, SIZE_BATCH, SIZE_CONTEXT)
    workspace = _workspace(sets[0])
    calls = [_paged(workspace, one, block_size, scattered=True) for one in sets]
    return BlockSizeTime(
        block_size=block_size,
        microseconds=1e6 * device_seconds([*calls], device),
        max_error=(calls[0]().double() - _exact(sets[0])).abs().max().item(),
    )


def _sets(device: torch.device, dtype: torch.dtype, heads: str, batch: int, context: int) -> list[_Set]:
    """Return layers that together exceed the L2 cache."""
    num_q, num_kv = HEADS[heads]
    size = batch * 2 * num_kv * context * HEAD_DIM * dtype.itemsize
    sets = []
    for _ in range(min(max(2, WORKING_SET // size), MAX_SETS)):
        kv = torch.randn(batch, 2, num_kv, context, HEAD_DIM, device=device, dtype=dtype)
        q = torch.randn(batch, num_q, HEAD_DIM, device=device, dtype=dtype)
        sets.append(_Set(q, kv, torch.empty_like(q)))
    return sets


def _workspace(one: _Set) -> DecodeWorkspace | DecodeGather:
    if not one.q.is_cuda:
        return DecodeGather()
    batch, heads, dim = one.q.shape
    return DecodeWorkspace.allocate(batch, heads, dim, one.q.device)


def _paged(
    workspace: DecodeWorkspace | DecodeGather,
    one: _Set,
    block_size: int,
    *,
    scattered: bool,
) -> Callable[[], Tensor]:
    batch, _, heads, context, dim = one.kv.shape
    device = one.kv.device
    each = -(-context // block_size)
    count = batch * each
    order = torch.randperm(count, device=device) if scattered else torch.arange(count, device=device)
    padded = F.pad(one.kv, (0, 0, 0, each * block_size - context))
    pieces = padded.view(batch, 2, heads, each, block_size, dim).permute(0, 3, 1, 2, 4, 5).flatten(0, 1)
    blocks = torch.empty_like(pieces, memory_format=torch.contiguous_format)
    blocks[order] = pieces
    tables = order.view(batch, each).int()
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)

    decodes = DecodeBatch(tables, rows, lens, rows, workspace)
    layer = AttentionLayer(one.q.shape[1], heads, dim, dim**-0.5)
    cache = LayerCache(blocks, UNSCALED[blocks.dtype])
    attend = decode if one.q.is_cuda else decode_reference

    def call() -> Tensor:
        attend(one.q, one.out, decodes, layer, cache)
        return one.out

    return call


def _contiguous(one: _Set) -> Callable[[], Tensor]:
    keys, values = one.kv.unbind(1)
    q = one.q[:, :, None]
    grouped = q.shape[1] != keys.shape[1]

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=grouped)[:, :, 0]

    return call


def _exact(one: _Set) -> Tensor:
    keys, values = one.kv.double().unbind(1)
    q = one.q.double().view(len(keys), keys.shape[1], -1, HEAD_DIM)
    return ((q @ keys.mT * HEAD_DIM**-0.5).softmax(-1) @ values).view_as(one.q)
