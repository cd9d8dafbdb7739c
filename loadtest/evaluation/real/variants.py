"""The tutorials' ways to paged attention (loadtest/attention_variants.py) on a device, beside our kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from quire.kernels.attention.batch import AttentionLayer, DecodeBatch, PrefillBatch
from quire.kernels.attention.decode import decode
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.prefill import prefill, prefill_reference
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.formats.kv_format import UNSCALED
from quire.kernels.formats.layer_cache import LayerCache
from quire.loadtest.attention_variants import VARIANTS, Case, contiguous, make_case, time_in_turn
from quire.loadtest.device_time import device_seconds

HEADS, HEAD_DIM, BLOCK_SIZE = 16, 128, 16
ROUNDS = 3


class VariantTimes(msgspec.Struct, frozen=True, kw_only=True):
    """`called`: milliseconds from the call to the end, by name. `on_device`: of those without launches.
    `max_error`: the largest difference to attention over contiguous keys and values in fp64."""

    is_decode: bool
    batch: int
    length: int
    called: dict[str, float]
    on_device: dict[str, float]
    max_error: dict[str, float]


@dataclass(frozen=True, slots=True)
class OurKernel:
    """Quire's kernel on a case's blocks, in the layout of its cache."""

    q: Tensor  # [tokens, heads, D]
    out: Tensor
    layer: AttentionLayer
    cache: LayerCache
    decodes: DecodeBatch
    prefills: PrefillBatch

    @classmethod
    def of(cls, case: Case) -> OurKernel:
        batch, heads, queries, dim = case.q.shape
        device = case.q.device
        q = case.q.transpose(1, 2).reshape(batch * queries, heads, dim).contiguous()
        rows = torch.arange(batch, dtype=torch.int32, device=device)
        kv = torch.stack([case.key_blocks, case.value_blocks], 1)
        tables = case.tables.int()
        context_lens = torch.full((batch,), case.length, dtype=torch.int32, device=device)
        query_starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * queries
        workspace = DecodeWorkspace.allocate(batch, heads, dim, device) if q.is_cuda else DecodeGather()
        return cls(
            q,
            torch.empty_like(q),
            AttentionLayer(heads, kv.shape[2], dim, dim**-0.5),
            LayerCache(kv, UNSCALED[kv.dtype]),
            DecodeBatch(tables, rows, context_lens, rows, workspace),
            PrefillBatch(tables, rows, query_starts, context_lens, queries),
        )

    def __call__(self) -> Tensor:
        """Return [batch, heads, queries, D]."""
        queries = self.prefills.max_query_len
        if queries == 1:
            attend = decode if self.q.is_cuda else decode_reference
            attend(self.q, self.out, self.decodes, self.layer, self.cache)
        else:
            fill = prefill if self.q.is_cuda else prefill_reference
            fill(self.q, self.out, self.prefills, self.layer, self.cache)
        return self.out.unflatten(0, (-1, queries)).transpose(1, 2)


def measure_variants(
    device: torch.device, dtype: torch.dtype, batch: int, length: int, *, is_decode: bool
) -> VariantTimes:
    queries = 1 if is_decode else length
    exact_case = make_case(batch, length, queries, HEADS, HEAD_DIM, BLOCK_SIZE, seed=0)
    case = exact_case.to(device, dtype)
    kernel = OurKernel.of(case)
    ways: dict[str, Callable[[Case], Tensor]] = {**VARIANTS, "Quire's kernel": lambda _: kernel()}
    exact = contiguous(case.to(device, torch.float64))
    on_device = {
        "contiguous": device_seconds([lambda: contiguous(case)], device),
        "Quire's kernel": device_seconds([kernel], device),
    }
    return VariantTimes(
        is_decode=is_decode,
        batch=batch,
        length=length,
        called={name: 1e3 * seconds for name, seconds in time_in_turn(case, ROUNDS, ways).items()},
        on_device={name: 1e3 * seconds for name, seconds in on_device.items()},
        max_error={name: (way(case).double() - exact).abs().max().item() for name, way in ways.items()},
    )
