"""Decode attention, kernel and reference, against fp64 attention over the gathered blocks."""

from collections.abc import Callable

import pytest
import torch
from paged import TOLERANCE, Paged, attend_exactly, fused_queries, make_paged

from kernels.decode_attention import decode_attention
from kernels.decode_reference import decode_attention_reference
from kernels.decode_splits import DecodeWorkspace, plan_splits
from kernels.shared_prefix import PrefixWorkspace

# (q heads, kv heads, head dim, block size, window): groups of 1, 2, 4, 7 and 8, every block size
SHAPES = [
    (2, 2, 64, 16, 0),
    (4, 2, 80, 32, 0),
    (4, 1, 128, 64, 0),
    (7, 1, 96, 128, 0),
    (8, 1, 64, 16, 1),
    (4, 2, 64, 32, 20),
    (2, 1, 64, 16, 64),
]
# Splits for each shape: as planned, one, fewer than tiles, as many, more.
SPLITS = [[None, 1], [3], [8], [2, None], [1, 3], [8], [2]]


def lengths_around(block_size: int) -> list[int]:
    return sorted({0, 1, block_size - 1, block_size, block_size + 1, 63, 64, 65, 130})


def poisoned_workspace(batch: int, heads: int, head_dim: int, device: torch.device) -> DecodeWorkspace:
    workspace = DecodeWorkspace.allocate(batch, heads, head_dim, device)
    workspace.partials.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    return workspace


UNTOUCHED = 7.0  # what `out` holds where nothing is to be written
BEYOND = 2  # tokens after the rows' own, of others in the step


def any_order(batch: int, device: torch.device) -> torch.Tensor:
    return torch.randperm(batch).int().to(device)


def expected(q: torch.Tensor, paged: Paged, window: int) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5
    parts = [
        attend_exactly(x, k, v, scale, window) if len(k) else torch.full(x.shape, UNTOUCHED).double()
        for x, k, v in zip(q[:-BEYOND].cpu().split(1), paged.keys, paged.values, strict=True)
    ]
    return torch.cat([*parts, torch.full((BEYOND, *q.shape[1:]), UNTOUCHED).double()])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "splits"),
    [(*shape, splits) for shape, plans in zip(SHAPES, SPLITS, strict=True) for splits in plans],
)
def test_kernel(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    splits: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    lengths = lengths_around(block_size)
    paged = make_paged(lengths, kv_heads, head_dim, block_size, dtype, device)
    q = fused_queries(len(lengths) + BEYOND, heads, head_dim, dtype).to(device)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    workspace = poisoned_workspace(len(lengths), heads, head_dim, device)
    decode_attention(
        q, out, paged.kv, paged.block_tables, paged.rows, paged.context_lens,
        any_order(len(lengths), device), head_dim**-0.5, window, workspace, splits,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), expected(q, paged, window), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window"), SHAPES)
def test_reference(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    lengths = lengths_around(block_size)
    paged = make_paged(lengths, kv_heads, head_dim, block_size, dtype, device)
    q = fused_queries(len(lengths) + BEYOND, heads, head_dim, dtype).to(device)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    decode_attention_reference(
        q, out, paged.kv, paged.block_tables, paged.rows, paged.context_lens,
        any_order(len(lengths), device), head_dim**-0.5, window,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), expected(q, paged, window), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("attention", [decode_attention, decode_attention_reference])
def test_a_batch_of_padding_writes_nothing(attention: Callable[..., None], device: torch.device) -> None:
    paged = make_paged([0, 0], 1, 64, 16, torch.float32, device)
    q = fused_queries(2, 2, 64, torch.float32).to(device)
    workspace = poisoned_workspace(2, 2, 64, device)
    out = torch.full(q.shape, UNTOUCHED, device=device)
    order = any_order(2, device)
    attention(
        q, out, paged.kv, paged.block_tables, paged.rows, paged.context_lens, order, 0.125, 0, workspace
    )
    assert torch.equal(out.cpu(), torch.full((2, 2, 64), UNTOUCHED))


@pytest.mark.parametrize("max_batch", [1, 3, 8, 64, 256, 1000])
def test_the_workspace_holds_every_plan(max_batch: int) -> None:
    capacity = DecodeWorkspace.allocate(max_batch, 1, 1, "meta").lse.numel()
    for batch in {1, (max_batch + 1) // 2, max_batch}:
        for kv_heads in (1, 2, 8, 32):
            for max_tiles in (1, 7, 64, 4096):
                splits = plan_splits(batch, kv_heads, max_tiles)
                assert 1 <= splits <= max_tiles
                assert splits == 1 or splits * batch <= capacity


def test_small_workspace_is_refused(device: torch.device) -> None:
    paged = make_paged([5] * 4, 1, 64, 16, torch.float32, device)
    q = fused_queries(4, 2, 64, torch.float32).to(device)
    workspace = DecodeWorkspace(
        torch.empty(7, 2, 64, device=device),
        torch.empty(7, 2, device=device),
        PrefixWorkspace.allocate(4, 2, 64, device),
    )
    with pytest.raises(ValueError, match="exceed the workspace"):
        decode_attention(
            q, torch.empty_like(q), paged.kv, paged.block_tables, paged.rows, paged.context_lens,
            any_order(4, device), 0.125, 0, workspace, 2,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("q_shape", "kv_shape", "message"),
    [
        ((1, 2, 64), (4, 2, 1, 16, 80), "dims must agree"),
        ((1, 3, 64), (4, 2, 2, 16, 64), "each kv head"),
        ((1, 2, 64), (4, 2, 2, 24, 64), "block size 24"),
    ],
)
def test_unfit_shapes_are_refused(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], message: str, device: torch.device
) -> None:
    integers = torch.zeros(1, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.allocate(1, 2, 64, device)
    with pytest.raises(ValueError, match=message):
        decode_attention(
            torch.zeros(q_shape, device=device), torch.zeros(q_shape, device=device),
            torch.zeros(kv_shape, device=device), integers[None], integers, integers, integers,
            0.125, 0, workspace,
        )  # fmt: skip


def test_scattered_heads_are_refused(device: torch.device) -> None:
    paged = make_paged([5], 1, 64, 16, torch.float32, device)
    q = torch.zeros(1, 64, 2, device=device).mT
    workspace = DecodeWorkspace.allocate(1, 2, 64, device)
    out = torch.zeros(q.shape, device=device)
    with pytest.raises(ValueError, match="contiguous within a token"):
        decode_attention(
            q, out, paged.kv, paged.block_tables, paged.rows, paged.context_lens, any_order(1, device),
            0.125, 0, workspace,
        )  # fmt: skip


def test_an_output_of_another_shape_is_refused(device: torch.device) -> None:
    paged = make_paged([5], 1, 64, 16, torch.float32, device)
    q = torch.zeros(1, 2, 64, device=device)
    workspace = DecodeWorkspace.allocate(1, 2, 64, device)
    with pytest.raises(ValueError, match="out must be contiguous"):
        decode_attention(
            q, q[:, :1], paged.kv, paged.block_tables, paged.rows, paged.context_lens, any_order(1, device),
            0.125, 0, workspace,
        )  # fmt: skip
