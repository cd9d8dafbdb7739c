"""Attention whose scores are capped and whose heads have sinks, kernels and references, against fp64."""

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

from quire.kernels.attention.batch import AttentionLayer
from quire.kernels.attention.cascade import SharedPrefixes, rows_of_cascade, shared_lens
from quire.kernels.attention.decode import DecodeMode, decode
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.prefill import prefill, prefill_reference
from quire.kernels.attention.recipes import Attending
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.kv_format import FP8, FP12, FP16, KVFormat
from quire.kernels.gpu import Gpu
from quire.kernels.linear.linear import Matrix
from quire.kernels.shapes import LayerShape, StepShape

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
KINDS = [("capped", 0), ("sinks", 20), ("both", 0)]


def layer_of(kind: str, window: int, device: torch.device) -> AttentionLayer:
    """Scores reach about 3, where a cap of 2 is felt; sinks weigh from nothing to nearly all."""
    sinks = None if kind == "capped" else torch.tensor([-20.0, 0.5, 3.0, 9.0], device=device)
    softcap = 0.0 if kind == "sinks" else 2.0
    return attention_layer(HEADS, KV_HEADS, HEAD_DIM, window, softcap=softcap, sinks=sinks)


def exactly(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """What the newest tokens q [Q, Hq, D] attend to, in fp64, step by step."""
    group = layer.group
    k, v = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.cpu().double(), k) * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    position = torch.arange(len(k) - len(q), len(k))[:, None]
    age = position - torch.arange(len(k))
    hidden = (age < 0) | ((age >= layer.window) if layer.window else torch.tensor(False))
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if layer.sinks is not None:
        total = total + layer.sinks.cpu().double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v)


def newest(q: torch.Tensor, paged: Paged, layer: AttentionLayer) -> torch.Tensor:
    parts = [
        exactly(x, k, v, layer) if len(k) else torch.full(x.shape, UNTOUCHED).double()
        for x, k, v in zip(q.split(1), paged.keys, paged.values, strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(("kind", "window"), KINDS)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode(kind: str, window: int, splits: int, device: torch.device) -> None:
    torch.manual_seed(0)
    lengths = [1, 65, 0, 130]
    paged = make_paged(lengths, KV_HEADS, HEAD_DIM, 16, torch.float32, device)
    q = fused_queries(len(lengths), HEADS, HEAD_DIM, torch.float32).to(device)
    layer = layer_of(kind, window, device)
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
    layer, out = layer_of("both", 0, device), torch.empty_like(q).contiguous()
    order = torch.zeros(1, dtype=torch.int32, device=device)
    workspace = poisoned_workspace(1, HEADS, HEAD_DIM, device)
    decode(q, out, paged.decodes(order, workspace), layer, cache, splits=1)
    expected = newest(q, paged, layer)
    torch.testing.assert_close(out.cpu().double(), expected, atol=TOLERANCE[torch.float16], rtol=0)


@pytest.mark.parametrize("splits", [1, 2])
def test_decode_that_writes_the_newest_keys(splits: int, device: torch.device) -> None:
    """The newest token's key is the last split's, the sinks are the first one's: with one split both are."""
    torch.manual_seed(0)
    paged = make_paged([66], KV_HEADS, HEAD_DIM, 16, torch.float32, device)
    row, last = int(paged.rows[0]), 65
    block = int(paged.block_tables[row, last // 16])
    qkv = torch.randn(1, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device)
    q = qkv[:, : HEADS * HEAD_DIM].unflatten(1, (HEADS, HEAD_DIM))
    new = qkv[:, HEADS * HEAD_DIM :].unflatten(1, (2, KV_HEADS, HEAD_DIM))[0].cpu()
    for held, part in ((paged.keys, 0), (paged.values, 1)):
        held[0][last] = new[part]
    paged.kv[block, :, :, last % 16] = torch.nan
    layer, out = layer_of("both", 0, device), torch.empty(1, HEADS, HEAD_DIM, device=device)
    order = torch.zeros(1, dtype=torch.int32, device=device)
    workspace = poisoned_workspace(1, HEADS, HEAD_DIM, device)
    decode(q, out, paged.decodes(order, workspace), layer, paged.cache(), DecodeMode.NEW, splits)
    torch.testing.assert_close(out.cpu().double(), newest(q, paged, layer), atol=2e-5, rtol=0)
    torch.testing.assert_close(paged.kv[block, :, :, last % 16].cpu(), new)


def test_decode_of_rows_that_share_a_prefix(device: torch.device) -> None:
    """The prefix is read once for all rows; the sinks are still counted once for each."""
    torch.manual_seed(0)
    paged = make_paged([300, 290], KV_HEADS, HEAD_DIM, 16, torch.float32, device)
    share_prefixes(paged, [[0, 1]], [256])
    q = fused_queries(2, HEADS, HEAD_DIM, torch.float32).to(device)
    members = torch.full((1, rows_of_cascade(HEADS // KV_HEADS)), -1, dtype=torch.int32, device=device)
    members[0, :2] = torch.arange(2)
    lens = shared_lens(members, paged.rows, paged.context_lens, paged.block_tables, 16)
    assert lens.tolist() == [256]
    shared = SharedPrefixes(members, torch.zeros(2, dtype=torch.int32, device=device), lens)
    layer, out = layer_of("both", 0, device), torch.empty(2, HEADS, HEAD_DIM, device=device)
    workspace = poisoned_workspace(2, HEADS, HEAD_DIM, device)
    order = torch.arange(2, dtype=torch.int32, device=device)
    decode(q, out, paged.decodes(order, workspace, shared), layer, paged.cache())
    torch.testing.assert_close(out.cpu().double(), newest(q, paged, layer), atol=2e-5, rtol=0)


@pytest.mark.parametrize("attention", [prefill, prefill_reference])
@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_prefill(attention: Callable[..., None], kind: str, window: int, device: torch.device) -> None:
    torch.manual_seed(0)
    paged = make_paged([17, 70, 0], KV_HEADS, HEAD_DIM, 16, torch.float32, device)
    q = fused_queries(25, HEADS, HEAD_DIM, torch.float32).to(device)
    out = torch.full(q.shape, UNTOUCHED, device=device)
    starts = torch.tensor([0, 17, 22, 25], dtype=torch.int32, device=device)
    layer = layer_of(kind, window, device)
    attention(q, out, paged.prefills(starts, 17), layer, paged.cache())
    expected = [
        exactly(q[begin:end], paged.keys[row], paged.values[row], layer)
        for row, (begin, end) in enumerate([(0, 17), (17, 22)])
    ]
    expected.append(torch.zeros(3, HEADS, HEAD_DIM).double())  # a row without a context
    torch.testing.assert_close(out.cpu().double(), torch.cat(expected), atol=2e-5, rtol=0)


def test_hoppers_kernels_take_plain_attention_alone() -> None:
    none, step = Matrix(1, 1), StepShape(64, 0, 1, 2048, None, False, 16, 4096)
    for plain in (True, False):
        shape = LayerShape(
            torch.float16, 32, CacheSpec(8, 128), none, none, none, none, gated=False, plain=plain
        )
        case = Attending(Gpu("H100", (9, 0), 232448, 132), shape, FP16, step)
        assert ("hopper" in case.decode_by.value) == ("hopper" in case.prefill_by.value) == plain
