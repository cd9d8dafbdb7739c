"""Time paged attention on a GPU beside FlashAttention-3 and the device's bounds.

    python -m quire.loadtest.gpu_attention [--block-size 16] [--kv-cache-dtype fp12_e4m7] [--json PATH]

Every case runs at least as many times as a model has layers, in one CUDA graph and in turn over input sets
that together exceed the L2 cache, as layers do: what a graph takes to begin and to end is no kernel's time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from quire.kernels.attention.batch import AttentionLayer, DecodeBatch, PrefillBatch
from quire.kernels.attention.decode import DecodeKernel, DecodeMode, decode
from quire.kernels.attention.dequantize import dequantize
from quire.kernels.attention.prefill import PrefillKernel, prefill
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.formats.kv_format import BF16, FP12, SCALED, KVFormat
from quire.kernels.formats.layer_cache import LayerCache
from quire.loadtest.command import command_parser, parse_for_cuda, write_json
from quire.loadtest.device_time import capture, replay_seconds
from quire.loadtest.gpu_layer import contexts_of
from quire.loadtest.offline.roofline import Ceilings, measure_ceilings

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
WORKING_SET = 200 << 20  # bytes, four times the L2 cache
MAX_SETS = 64
LAYERS = 32  # of the model whose heads most cases have
REPLAYS = 15


@dataclass(frozen=True)
class Case:
    """Sequences of one attention call, and FlashAttention-3's rate: TB/s for decode, TFLOP/s for prefill.

    That is None where it was not measured.
    """

    name: str
    context_lens: list[int]
    query_lens: list[int]
    flash_attention_3: float | None
    num_q_heads: int = 32
    num_kv_heads: int = 8

    @property
    def is_decode(self) -> bool:
        return max(self.query_lens) == 1

    def key_bytes(self, kv_cache_dtype: str) -> int:
        """Return the bytes of K and V, each read once, and a rounded cache's scales."""
        vector_bytes = SCALED.get(kv_cache_dtype, BF16).vector_bytes(HEAD_DIM)
        return sum(self.context_lens) * self.num_kv_heads * 2 * vector_bytes

    @property
    def flops(self) -> int:
        """Return the FLOP of both matmuls, over the visible keys only."""
        pairs = sum(
            n * context - n * (n - 1) // 2
            for n, context in zip(self.query_lens, self.context_lens, strict=True)
        )
        return 4 * HEAD_DIM * self.num_q_heads * pairs


@dataclass(frozen=True)
class Measurement:
    """A case's median time, its rate and FA3's in `unit`, its share of the bound, and error against fp64."""

    name: str
    block_size: int
    kv_cache_dtype: str
    microseconds: float
    rate: float
    flash_attention_3: float | None
    unit: str
    share_of_bound: float
    max_error: float


def decode_case(
    rows: int, context: int, microseconds: float | None, *, heads: int = 32, name: str | None = None
) -> Case:
    """Return a decode case of equal rows, with FlashAttention-3's time, if known, turned into a rate."""
    case = Case(name or f"decode B{rows} ctx {context}", [context] * rows, [1] * rows, None, heads)
    if microseconds is None:
        return case
    return replace(case, flash_attention_3=case.key_bytes("bfloat16") / microseconds / 1e6)


def all_cases() -> list[Case]:
    ragged = np.random.default_rng(0).integers(1, 4097, 256).tolist()
    short = contexts_of(64, 128, "long-tailed")
    return [
        decode_case(1, 8192, 30.0),
        decode_case(8, 2048, 43.7),
        decode_case(32, 1024, None),
        decode_case(32, 2048, 112.0),
        *(decode_case(rows, 1024, None) for rows in (33, 34, 35, 36, 40, 44, 48, 50, 52, 64)),
        decode_case(128, 1024, None),
        decode_case(256, 1024, 385.0),
        decode_case(64, 16384, 1419.0),
        Case("decode B256 ragged 1-4096", ragged, [1] * 256, 2.93),
        decode_case(1, 512, 15.1, heads=16, name="decode B1 ctx 512, 16/8"),
        Case("prefill 1x1024", [1024], [1024], None),
        Case("prefill 4x1024", [1024] * 4, [1024] * 4, None),
        Case("prefill 8x1024, 16/8", [1024] * 8, [1024] * 8, None, 16),
        Case("prefill 64 of about 128", short, short, None),
        Case("prefill 64 of about 128, 16/8", short, short, None, 16),
        Case("prefill 32x512", [512] * 32, [512] * 32, 286.0),
        Case("prefill 8x2048", [2048] * 8, [2048] * 8, 476.0),
        Case("prefill 2x8192", [8192] * 2, [8192] * 2, 572.0),
        Case("extend 2048 on 14336", [16384], [2048], 594.0),
    ]


def quantized(exact: torch.Tensor, held: KVFormat) -> LayerCache:
    """Round a cache's vectors [blocks, 2, Hkv, block_size, D], some blocks at a time: it takes much room."""
    *lead, block_size, head_dim = exact.shape
    memory = torch.empty(*lead, block_size * held.elements(head_dim), dtype=held.dtype, device=exact.device)
    values = held.vectors(memory, block_size, head_dim)
    scales = torch.empty(exact.shape[:-1], dtype=torch.float16, device=exact.device)
    for part, *into in zip(*(x.split(4096) for x in (exact, values, scales)), strict=True):
        for target, rounded in zip(into, held.quantize(part), strict=True):
            target.copy_(rounded)
    return LayerCache(values, held, scales.permute(0, 2, 3, 1).contiguous())


class CaseInputs:
    """Device tensors of a case: one cache, whose tables hold `num_sets` disjoint copies of the batch."""

    def __init__(self, case: Case, block_size: int, kv_cache_dtype: str, device: str = "cuda") -> None:
        self.case = case
        self.num_sets = min(max(2, math.ceil(WORKING_SET / case.key_bytes(kv_cache_dtype))), MAX_SETS)
        batch = len(case.context_lens)
        width = -(-max(case.context_lens) // block_size)
        used = [-(-length // block_size) for length in case.context_lens]
        num_blocks = self.num_sets * sum(used)
        free = np.random.default_rng(1).permutation(num_blocks)
        tables = np.zeros((self.num_sets * batch, width), np.int32)
        taken = 0
        for row, count in enumerate(used * self.num_sets):
            tables[row, :count] = free[taken : taken + count]
            taken += count
        shape = (num_blocks, 2, case.num_kv_heads, block_size, HEAD_DIM)
        exact = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.cache = LayerCache(exact, BF16)
        if kv_cache_dtype in SCALED:
            self.cache = quantized(exact, SCALED[kv_cache_dtype])
        self.block_tables = torch.from_numpy(tables).to(device)
        self.rows = torch.arange(self.num_sets * batch, dtype=torch.int32, device=device).split(batch)
        self.context_lens = torch.tensor(case.context_lens, dtype=torch.int32, device=device)
        self.order = torch.argsort(self.context_lens, descending=True).int()
        starts = np.concatenate([[0], np.cumsum(case.query_lens)])
        self.query_starts = torch.from_numpy(starts.astype(np.int32)).to(device)
        tokens = sum(case.query_lens)
        width = (case.num_q_heads + 2 * case.num_kv_heads) * HEAD_DIM
        qkv = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        self.q = qkv[:, : case.num_q_heads * HEAD_DIM].view(tokens, case.num_q_heads, HEAD_DIM)
        self.out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        self.workspace = DecodeWorkspace.allocate(batch, case.num_q_heads, HEAD_DIM, device)
        self.layer = AttentionLayer(case.num_q_heads, case.num_kv_heads, HEAD_DIM, SCALE)
        if self.cache.format == FP12 and not case.is_decode:
            self.cache = replace(
                self.cache, dequantized=torch.empty(shape, dtype=torch.bfloat16, device=device)
            )
            self._expand()

    def _expand(self) -> None:
        """Dequantize all keys and values, as a step's own are already there when prefill attention begins."""
        none = torch.zeros_like(self.query_starts)
        for rows in self.rows:
            dequantize(PrefillBatch(self.block_tables, rows, none, self.context_lens, 0), self.cache)

    def attention(self, index: int, by: DecodeKernel | PrefillKernel | None = None) -> torch.Tensor:
        """Attend over input set `index`, by that kernel; None is the one that a model gets."""
        rows, lens = self.rows[index], self.context_lens
        if self.case.is_decode:
            decodes = DecodeBatch(self.block_tables, rows, lens, self.order, self.workspace)
            assert not isinstance(by, PrefillKernel)
            decode(self.q, self.out, decodes, self.layer, self.cache, DecodeMode.KNOWN, by=by)
        else:
            longest = max(self.case.query_lens)
            prefills = PrefillBatch(self.block_tables, rows, self.query_starts, lens, longest)
            assert not isinstance(by, DecodeKernel)
            prefill(self.q, self.out, prefills, self.layer, self.cache, by=by)
        return self.out

    def max_error(self, by: DecodeKernel | PrefillKernel | None = None) -> float:
        """Return the largest difference to fp64 over a few queries of the first, middle and last sequence."""
        out = self.attention(0, by)
        batch = len(self.case.context_lens)
        block_size = self.cache.block_size
        group = self.case.num_q_heads // self.case.num_kv_heads
        errors = []
        for sequence in {0, batch // 2, batch - 1}:
            context_len, query_len = self.case.context_lens[sequence], self.case.query_lens[sequence]
            blocks = self.block_tables[sequence, : -(-context_len // block_size)].long()
            parts = torch.arange(2, device=blocks.device)[:, None, None]
            heads = torch.arange(self.case.num_kv_heads, device=blocks.device)[:, None]
            held = self.cache.read((blocks, parts, heads))
            k, v = held.double().flatten(2, 3)  # [Hkv, keys, D]
            for query in {0, query_len // 3, query_len - 1}:
                token = int(self.query_starts[sequence]) + query
                keys = context_len - query_len + query + 1
                q = self.q[token].double().view(-1, group, HEAD_DIM)
                exact = (q @ k[:, :keys].mT * SCALE).softmax(-1) @ v[:, :keys]
                errors.append((exact.flatten(0, 1) - out[token].double()).abs().max().item())
        return max(errors)


def graph_microseconds(call: Callable[[int], object], sets: int) -> float:
    """Return the median time of `call(i)`, for i = 0 … sets − 1 again and again, inside a CUDA graph."""
    calls = [partial(call, index % sets) for index in range(max(sets, LAYERS))]
    return 1e6 * statistics.median(replay_seconds(capture(calls), REPLAYS)) / len(calls)


def measure(case: Case, block_size: int, kv_cache_dtype: str, ceilings: Ceilings) -> Measurement:
    inputs = CaseInputs(case, block_size, kv_cache_dtype)
    error = inputs.max_error()
    microseconds = graph_microseconds(inputs.attention, inputs.num_sets)
    if case.is_decode:
        work, unit, bound = case.key_bytes(kv_cache_dtype), "TB/s", ceilings.bandwidth
    else:
        work, unit, bound = case.flops, "TFLOP/s", ceilings.flops
    rate = work / microseconds / 1e6
    return Measurement(
        name=case.name,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        microseconds=microseconds,
        rate=rate,
        flash_attention_3=case.flash_attention_3,
        unit=unit,
        share_of_bound=rate * 1e12 / bound,
        max_error=error,
    )


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--block-size", type=int, default=16, choices=[16, 32, 64, 128])
    parser.add_argument("--kv-cache-dtype", default="bfloat16", choices=["bfloat16", *SCALED])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the measurements there")
    arguments = parse_for_cuda(parser)
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    copy_tb_s, product_tflop_s = ceilings.bandwidth / 1e12, ceilings.flops / 1e12
    print(
        f"{device}, torch {torch.__version__}, block size {arguments.block_size}, bf16, "
        f"KV cache {arguments.kv_cache_dtype}, head dim {HEAD_DIM}; "
        f"bounds: a copy's {copy_tb_s:.2f} TB/s, a product's {product_tflop_s:.0f} TFLOP/s"
    )
    print(f"{'case':30}{'µs':>9}{'rate':>9}{'FA3':>9}  {'unit':8}{'of bound':>9}{'error':>10}")
    measurements = []
    for case in all_cases():
        m = measure(case, arguments.block_size, arguments.kv_cache_dtype, ceilings)
        measurements.append(m)
        known = "–" if m.flash_attention_3 is None else f"{m.flash_attention_3:.2f}"
        print(
            f"{m.name:30}{m.microseconds:9.1f}{m.rate:9.2f}{known:>9}  {m.unit:8}"
            f"{m.share_of_bound:9.0%}{m.max_error:10.1e}",
            flush=True,
        )
        torch.cuda.empty_cache()
    bounds = {"copy_tb_s": round(copy_tb_s, 3), "product_tflop_s": round(product_tflop_s)}
    write_json(arguments.json, device, {**bounds, "cases": [asdict(m) for m in measurements]})


if __name__ == "__main__":
    main()
