"""Attention with ALiBi's slopes and in chunks, kernels and references, against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from paged import (
    TOLERANCE,
    UNTOUCHED,
    Paged,
    attention_layer,
    fused_queries,
    make_paged,
    poisoned_workspace,
    share_prefixes,
)
from quantized import in_format

from quire.kernels.attention import recipes
from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.attention.cascade import SharedPrefixes, rows_of_cascade
from quire.kernels.attention.decode import DecodeMode, decode
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.kv_tile import LARGEST_KEY_TILE
from quire.kernels.attention.prefill import prefill, prefill_reference
from quire.kernels.attention.recipes import ATTEND, Attending
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.kv_format import FP8, FP12, FP16, KVFormat
from quire.kernels.gpu import Gpu
from quire.kernels.linear.linear import Matrix
from quire.kernels.recipes import choose
from quire.kernels.shapes import LayerShape, StepShape

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
CHUNK = 20  # which ends within a block and within a tile
KINDS = ["slopes", "chunks", "both", "slopes in a window"]


def layer_of(kind: str, device: torch.device) -> AttentionLayer:
    """A head whose newest keys count alone, and one to which all are nearly alike."""
    slopes = None
    if kind != "chunks":
        slopes = torch.tensor([2.0, 0.5, 0.1, 0.01], device=device)
    chunked, window = kind in ("chunks", "both"), 0 if kind == "slopes" else CHUNK
    return attention_layer(HEADS, KV_HEADS, HEAD_DIM, window, slopes=slopes, chunked=chunked)


def exactly(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """What the newest tokens q [Q, Hq, D] attend to, in fp64, step by step."""
    k, v = (part.double().repeat_interleave(layer.group, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.cpu().double(), k) * layer.scale
    position = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))
    if layer.slopes is not None:
        scores += layer.slopes.cpu().double()[:, None, None] * (key - position)
    hidden = key > position
    if layer.chunked:
        hidden = hidden | (key // layer.window != position // layer.window)
    elif layer.window:
        hidden = hidden | (key <= position - layer.window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def newest(q: torch.Tensor, paged: Paged, layer: AttentionLayer) -> torch.Tensor:
    parts = [
        exactly(x, k, v, layer) if len(k) else torch.full(x.shape, UNTOUCHED).double()
        for x, k, v in zip(q.split(1), paged.keys, paged.values, strict=True)
    ]
    return torch.cat(parts)


def forget_what_is_behind(paged: Paged, layer: AttentionLayer, first_queries: list[int]) -> None:
    """Have NaN in blocks before the tiles that the first queries see: they may be others' by now."""
    for at, position in enumerate(first_queries):
        first = position // layer.window * layer.window if layer.chunked else 0
        first = first // LARGEST_KEY_TILE * LARGEST_KEY_TILE
        for block in paged.block_tables[int(paged.rows[at]), : first // 16].tolist():
            paged.kv[block] = torch.nan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode(kind: str, splits: int, device: torch.device) -> None:
    """Rows that begin a chunk, end one, and are in the midst of a later one."""
    torch.manual_seed(0)
    lengths = [1, CHUNK, CHUNK + 1, 0, 130]
    paged = make_paged(lengths, KV_HEADS, HEAD_DIM, 16, torch.float32, device)
    q = fused_queries(len(lengths), HEADS, HEAD_DIM, torch.float32).to(device)
    layer = layer_of(kind, device)
    forget_what_is_behind(paged, layer, [max(length - 1, 0) for length in lengths])
    order = torch.arange(len(lengths), dtype=torch.int32, device=device)
    out, reference = (torch.full(q.shape, UNTOUCHED, device=device) for _ in range(2))
    workspace = poisoned_workspace(len(lengths), HEADS, HEAD_DIM, device)
    decode(q, out, paged.decodes(order, workspace), layer, paged.cache(), splits=splits)
    decode_reference(q, reference, paged.decodes(order, DecodeGather()), layer, paged.cache())
    expected = newest(q, paged, layer)
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(reference.cpu().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("held", [FP8, FP12], ids=lambda held: held.name)
def test_decode_of_a_rounded_cache(held: KVFormat, device: torch.device) -> None:
    torch.manual_seed(0)
    exact = make_paged([70], KV_HEADS, HEAD_DIM, 16, torch.float16, device)
    paged, cache = in_format(exact, held)
    q = fused_queries(1, HEADS, HEAD_DIM, torch.float16).to(device)
    layer, out = layer_of("slopes", device), torch.empty_like(q).contiguous()
    order = torch.zeros(1, dtype=torch.int32, device=device)
    workspace = poisoned_workspace(1, HEADS, HEAD_DIM, device)
    decode(q, out, paged.decodes(order, workspace), layer, cache, splits=1)
    expected = newest(q, paged, layer)
    torch.testing.assert_close(out.cpu().double(), expected, atol=TOLERANCE[torch.float16], rtol=0)


@pytest.mark.parametrize("length", [66, 61])  # the latter's newest token begins a chunk
def test_decode_that_writes_the_newest_keys(length: int, device: torch.device) -> None:
    torch.manual_seed(0)
    paged = make_paged([length], KV_HEADS, HEAD_DIM, 16, torch.float32, device)
    row, last = int(paged.rows[0]), length - 1
    block = int(paged.block_tables[row, last // 16])
    qkv = torch.randn(1, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device)
    q = qkv[:, : HEADS * HEAD_DIM].unflatten(1, (HEADS, HEAD_DIM))
    new = qkv[:, HEADS * HEAD_DIM :].unflatten(1, (2, KV_HEADS, HEAD_DIM))[0].cpu()
    for held, part in ((paged.keys, 0), (paged.values, 1)):
        held[0][last] = new[part]
    paged.kv[block, :, :, last % 16] = torch.nan
    layer, out = layer_of("both", device), torch.empty(1, HEADS, HEAD_DIM, device=device)
    order = torch.zeros(1, dtype=torch.int32, device=device)
    workspace = poisoned_workspace(1, HEADS, HEAD_DIM, device)
    decode(q, out, paged.decodes(order, workspace), layer, paged.cache(), DecodeMode.NEW, 2)
    torch.testing.assert_close(out.cpu().double(), newest(q, paged, layer), atol=2e-5, rtol=0)
    torch.testing.assert_close(paged.kv[block, :, :, last % 16].cpu(), new)


def test_rows_that_share_a_prefix_read_it_each_for_itself(device: torch.device) -> None:
    torch.manual_seed(0)
    paged = make_paged([300, 290], KV_HEADS, HEAD_DIM, 16, torch.float32, device)
    share_prefixes(paged, [[0, 1]], [256])
    q = fused_queries(2, HEADS, HEAD_DIM, torch.float32).to(device)
    members = torch.full((1, rows_of_cascade(HEADS // KV_HEADS)), -1, dtype=torch.int32, device=device)
    members[0, :2] = torch.arange(2)
    lens = torch.tensor([256], dtype=torch.int32, device=device)
    shared = SharedPrefixes(members, torch.zeros(2, dtype=torch.int32, device=device), lens)
    layer, out = layer_of("slopes", device), torch.empty(2, HEADS, HEAD_DIM, device=device)
    workspace = poisoned_workspace(2, HEADS, HEAD_DIM, device)
    order = torch.arange(2, dtype=torch.int32, device=device)
    decode(q, out, paged.decodes(order, workspace, shared), layer, paged.cache())
    torch.testing.assert_close(out.cpu().double(), newest(q, paged, layer), atol=2e-5, rtol=0)


@pytest.mark.parametrize("attention", [prefill, prefill_reference])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill(attention: Callable[..., None], kind: str, device: torch.device) -> None:
    """A prompt from its start, over three chunks; and queries from one chunk into the next."""
    torch.manual_seed(0)
    paged = make_paged([45, 150, 0], KV_HEADS, HEAD_DIM, 16, torch.float32, device)
    q = fused_queries(53, HEADS, HEAD_DIM, torch.float32).to(device)
    out = torch.full(q.shape, UNTOUCHED, device=device)
    starts = torch.tensor([0, 45, 50, 53], dtype=torch.int32, device=device)
    layer = layer_of(kind, device)
    forget_what_is_behind(paged, layer, [0, 145, 0])
    attention(q, out, paged.prefills(starts, 45), layer, paged.cache())
    expected = [
        exactly(q[begin:end], paged.keys[row], paged.values[row], layer)
        for row, (begin, end) in enumerate([(0, 45), (45, 50)])
    ]
    expected.append(torch.zeros(3, HEADS, HEAD_DIM).double())  # a row without a context
    torch.testing.assert_close(out.cpu().double(), torch.cat(expected), atol=2e-5, rtol=0)


def test_a_chunk_has_a_length() -> None:
    with pytest.raises(ValueError, match="needs a window"):
        attention_layer(HEADS, KV_HEADS, HEAD_DIM, chunked=True)


def test_splits_of_chunks_are_merged_before_the_projection() -> None:
    """What merges them on its way in reckons splits of whole contexts and of windows."""
    output = Matrix(2048, 1024)
    gpu = Gpu("H100", (9, 0), 232448, 132)
    step = StepShape(1, 1, None, 0, None, False, 16, 4096)
    for chunked in (False, True):
        none = Matrix(1, 1)
        shape = LayerShape(
            torch.float16, 8, CacheSpec(2, 128, 512), none, output, none, none, gated=True, plain=not chunked,
            chunked=chunked,
        )  # fmt: skip
        chosen = choose(ATTEND, Attending(gpu, shape, FP16, step, fused=True))
        assert (chosen.name == recipes.UNMERGED) == (not chunked)
