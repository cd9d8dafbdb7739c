"""Decode attention, kernel and reference, against fp64 attention over the gathered blocks."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from paged import (
    HAS_GPU,
    TOLERANCE,
    UNTOUCHED,
    Paged,
    attention_layer,
    decode_exactly,
    fused_queries,
    make_paged,
    poisoned_workspace,
    with_dtypes,
)
from quantized import FP8, FP12, in_format

from quire.kernels.attention.batch import DecodeBatch
from quire.kernels.attention.cascade import PrefixWorkspace
from quire.kernels.attention.decode import DecodeMode, decode, decode_splits
from quire.kernels.attention.decode_reference import decode_reference
from quire.kernels.attention.gather import WORTH_A_PART, DecodeGather
from quire.kernels.attention.hopper_decode.decode import STAGES, STAGES_OF_HALVES, TILE, hopper_decode
from quire.kernels.attention.splits import RESIDENT, DecodeWorkspace, plan_division
from quire.kernels.formats.kv_format import FP32, KVFormat
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import gpu_of

# (q heads, kv heads, head dim, block size, window): groups of 1, 2, 4, 7 and 8, every block size
SHAPES = [
    (2, 2, 64, 16, 0),
    (4, 2, 80, 32, 0),
    (4, 1, 128, 64, 0),
    (7, 1, 96, 128, 0),
    (8, 1, 64, 16, 1),
    (4, 2, 64, 32, 20),
    (2, 1, 64, 16, 64),
    (4, 2, 64, 1, 0),
    (4, 1, 128, 2, 0),
    (7, 1, 96, 4, 20),
    (8, 1, 64, 8, 0),
    (4, 1, 128, 256, 0),
    (4, 2, 64, 512, 20),
    (2, 1, 64, 1024, 0),
]
# Splits for each shape: as planned, one, fewer than tiles, as many, more.
SPLITS = [[None, 1], [3], [8], [2, None], [1, 3], [8], [2], [None, 2], [1], [3], [8], [2], [3], [2]]


def lengths_around(block_size: int) -> list[int]:
    return sorted({0, 1, block_size - 1, block_size, block_size + 1, 63, 64, 65, 130})


def held_as(paged: Paged, held: KVFormat | None) -> tuple[Paged, LayerCache]:
    """The same, and its cache, in a rounded format, or with None as it is."""
    return (paged, paged.cache()) if held is None else in_format(paged, held)


def of_hopper(dtype: torch.dtype, held: KVFormat | None, device: torch.device) -> bool:
    """Whether `quire.kernels.attention.hopper_decode.decode` takes such heads."""
    types = {torch.float16, torch.bfloat16} if held is None else {torch.bfloat16}
    return gpu_of(device).has_dependent_launch and dtype in types


# A step's keys and values: what is ready before the kernel ahead, and what they are held as.
MODES_AND_FORMATS = [
    (0, DecodeMode.AFTER, None),
    (0, DecodeMode.KNOWN, FP12),
    (0, DecodeMode.BESIDE, None),
    (600, DecodeMode.AFTER, FP12),
    *(
        [
            (0, DecodeMode.AFTER, FP12),
            (0, DecodeMode.KNOWN, None),
            (0, DecodeMode.BESIDE, FP12),
            (600, DecodeMode.AFTER, None),
        ]
        if HAS_GPU
        else []
    ),
]

# (head dim, and those): heads that Hopper multiplies in halves, as many as its cache holds in their own type.
WITH_LARGE_HEADS = [
    *((128, *rest) for rest in MODES_AND_FORMATS),
    *((dim, *rest) for dim in (136, 256) for rest in MODES_AND_FORMATS if HAS_GPU and rest[2] is None),
]

BEYOND = 2  # tokens after the rows' own, of others in the step


def any_order(batch: int, device: torch.device) -> torch.Tensor:
    return torch.randperm(batch).int().to(device)


def expected(q: torch.Tensor, paged: Paged, window: int) -> torch.Tensor:
    beyond = torch.full((BEYOND, *q.shape[1:]), UNTOUCHED).double()
    return torch.cat([decode_exactly(q[:-BEYOND], paged, window), beyond])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "splits", "dtype"),
    with_dtypes((*shape, splits) for shape, plans in zip(SHAPES, SPLITS, strict=True) for splits in plans),
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
    batch = paged.decodes(any_order(len(lengths), device), workspace)
    layer = attention_layer(heads, kv_heads, head_dim, window)
    decode(q, out, batch, layer, paged.cache(), splits=splits)
    torch.testing.assert_close(out.cpu().double(), expected(q, paged, window), atol=TOLERANCE[dtype], rtol=0)


# Of many tiles, so that stages are filled again and again, and of large groups: (shape, splits).
LONG_SHAPES = [
    ((4, 1, 128, 16, 0), 1),
    ((15, 1, 128, 32, 0), 2),
    ((16, 1, 64, 16, 0), 1),
    ((4, 2, 64, 64, 400), 3),
    ((4, 1, 128, 128, 0), 1),
    *([((16, 1, 128, 16, 0), 1), ((62, 2, 64, 16, 0), 2), ((32, 1, 128, 32, 90), 1)] if HAS_GPU else []),
    *([((8, 2, 256, 16, 0), 1), ((20, 1, 256, 16, 0), 3), ((4, 1, 256, 64, 90), 1)] if HAS_GPU else []),
]


@pytest.mark.parametrize(("shape", "splits", "dtype"), with_dtypes(LONG_SHAPES))
@pytest.mark.parametrize(
    ("mode", "held"),
    [
        (DecodeMode.AFTER, None),
        *([(DecodeMode.KNOWN, None), (DecodeMode.AFTER, FP12), (DecodeMode.KNOWN, FP12)] if HAS_GPU else []),
    ],
)
def test_long_contexts(
    shape: tuple[int, int, int, int, int],
    splits: int,
    mode: DecodeMode,
    held: KVFormat | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    heads, kv_heads, head_dim, block_size, window = shape
    torch.manual_seed(0)
    lengths = [453, 384, 64, 700, 321] if device.type == "cuda" else [200, 64]
    exact = make_paged(lengths, kv_heads, head_dim, block_size, dtype, device)
    paged, cache = held_as(exact, held)
    q = fused_queries(len(lengths) + BEYOND, heads, head_dim, dtype).to(device)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    workspace = poisoned_workspace(len(lengths), heads, head_dim, device)
    batch = paged.decodes(any_order(len(lengths), device), workspace)
    decode(q, out, batch, attention_layer(heads, kv_heads, head_dim, window), cache, mode, splits)
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
    batch = paged.decodes(any_order(len(lengths), device), DecodeGather())
    decode_reference(q, out, batch, attention_layer(heads, kv_heads, head_dim, window), paged.cache())
    torch.testing.assert_close(out.cpu().double(), expected(q, paged, window), atol=TOLERANCE[dtype], rtol=0)


@st.composite
def mixed_lengths(draw: st.DrawFn) -> list[int]:
    """Some alike and some far apart: enough for several parts, in any order, and rows without a context."""
    alike = st.tuples(st.sampled_from([1, 40, 130, 700]), st.integers(1, 6), st.integers(0, 2**32))
    lengths = [0] * draw(st.integers(0, 2))
    for longest, count, seed in draw(st.lists(alike, min_size=1, max_size=3)):
        lengths += torch.randint(
            1, longest + 1, (count,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
    return draw(st.permutations(lengths))


@given(
    lengths=st.lists(mixed_lengths(), min_size=2, max_size=2),
    window=st.sampled_from([0, 50]),
    held=st.sampled_from([None, FP8, FP12]),
)
def test_the_references_rows_attend_as_they_would_alone(
    lengths: list[list[int]], window: int, held: KVFormat | None
) -> None:
    """Two batches in turn by one gather, as in the layers of a step that wants its newest tokens alone."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim, block_size = 4, 2, 64, 16
    gather = DecodeGather()
    layer = attention_layer(heads, kv_heads, head_dim, window)
    batches = []
    for each in lengths:
        exact = make_paged(each, kv_heads, head_dim, block_size, torch.float32, torch.device("cpu"))
        paged, cache = held_as(exact, held)
        q = fused_queries(len(each) + BEYOND, heads, head_dim, torch.float32)
        alone = torch.full(q.shape, UNTOUCHED)
        first = torch.zeros(1, dtype=torch.int32)
        for row in range(len(each)):
            batch = paged.decodes(first, DecodeGather(), rows=slice(row, row + 1))
            decode_reference(q[row : row + 1], alone[row : row + 1], batch, layer, cache)
        torch.testing.assert_close(alone.double(), expected(q, paged, window), atol=1e-5, rtol=0)
        order = any_order(len(each), q.device)
        batches.append((q, cache, paged.decodes(order, gather), alone))
    for q, cache, batch, alone in [batches[0], *batches, batches[0]]:
        out = torch.full(q.shape, UNTOUCHED)
        decode_reference(q, out, batch, layer, cache)
        torch.testing.assert_close(out, alone, atol=1e-5, rtol=0)


@given(lengths=mixed_lengths(), heads=st.integers(1, 32))
def test_the_reference_pads_little_and_no_part_for_nothing(lengths: list[int], heads: int) -> None:
    """However long the longest context is, what a row costs is its own, but for a part's launch or so."""
    paged = make_paged(lengths, 1, 2, 16, torch.float32, torch.device("cpu"))
    kv_shape = torch.Size((1, 2, heads, 16, 64))
    parts = DecodeGather().parts(paged.block_tables, paged.rows, paged.context_lens, kv_shape, 0)
    floats = 2 * heads * 64
    left = sum(length > 0 for length in lengths)
    longer = 0
    for part in parts:
        own = paged.context_lens[part.members]
        assert part.longest == own.max()
        assert longer == 0 or (longer - part.longest) * left * floats > WORTH_A_PART
        assert all(
            (part.longest - length) * (left - done) * floats <= WORTH_A_PART
            for done, length in enumerate(own.sort(descending=True).values.tolist())
        )
        left -= len(own)
        longer = part.longest
    assert left == 0


@pytest.mark.parametrize(
    ("window", "mode", "held", "dtype"),
    with_dtypes(MODES_AND_FORMATS),
)
def test_long_rows_beside_short_ones(
    window: int,
    mode: DecodeMode,
    held: KVFormat | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Hopper divides the long ones: the same workspace serves one layer after the other."""
    on_gpu = device.type == "cuda"
    lengths = [3, 1100, 0, 577, 64, 512, 513, 1, *[30] * 9] if on_gpu else [3, 140, 0]
    paged, cache = held_as(make_paged(lengths, 2, 64, 16, dtype, device), held)
    q = fused_queries(len(lengths) + BEYOND, 4, 64, dtype).to(device)
    workspace = poisoned_workspace(len(lengths), 4, 64, device)
    order = paged.context_lens.argsort(descending=True).int()
    layers = [torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device) for _ in range(3 if on_gpu else 1)]
    for out in layers:
        batch = paged.decodes(order, workspace)
        if mode is DecodeMode.BESIDE:
            out.fill_(UNTOUCHED)  # a kernel that begins when the layer before has ended, as a prefill does
        decode(q, out, batch, attention_layer(4, 2, 64, window), cache, mode, splits=1)
    for out in layers:
        torch.testing.assert_close(
            out.cpu().double(), expected(q, paged, window), atol=TOLERANCE[dtype], rtol=0
        )
    assert not workspace.arrivals.any()
    assert workspace.lse.isfinite().any() == of_hopper(dtype, held, device)


@pytest.mark.parametrize(("kv_heads", "more", "left_splits"), [(2, 3, 3), (8, 1, 8)])
@pytest.mark.parametrize(
    ("head_dim", "window", "mode", "held", "dtype"),
    with_dtypes(WITH_LARGE_HEADS),
)
def test_a_few_rows_more_than_run_at_once(
    kv_heads: int,
    more: int,
    left_splits: int,
    head_dim: int,
    window: int,
    mode: DecodeMode,
    held: KVFormat | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Hopper divides those that come last, though they are the shortest."""
    on_gpu = device.type == "cuda"
    undivided = RESIDENT * gpu_of(device).multiprocessors // kv_heads if on_gpu else 1
    lengths = [700 - i for i in range(undivided + more)] if on_gpu else [130, 129, 65]
    heads = 2 * kv_heads
    paged, cache = held_as(make_paged(lengths, kv_heads, head_dim, 16, dtype, device), held)
    q = fused_queries(len(lengths) + BEYOND, heads, head_dim, dtype).to(device)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    workspace = poisoned_workspace(len(lengths), heads, head_dim, device)
    order = paged.context_lens.argsort(descending=True).int()
    layer = attention_layer(heads, kv_heads, head_dim, window)
    decode(q, out, paged.decodes(order, workspace), layer, cache, mode, splits=1)
    torch.testing.assert_close(out.cpu().double(), expected(q, paged, window), atol=TOLERANCE[dtype], rtol=0)
    assert not workspace.arrivals.any()
    if of_hopper(dtype, held, device):
        dim = triton.next_power_of_2(head_dim)
        division = plan_division(len(lengths), kv_heads, dim, gpu_of(device).multiprocessors, workspace)
        assert division.left_splits == left_splits
        expected_parts = []
        for row in range(undivided, len(lengths)):
            tiles = -(-lengths[row] // TILE) - (max(lengths[row] - window, 0) // TILE if window else 0)
            part_tiles = -(-tiles // left_splits)
            expected_parts += [row * left_splits + part for part in range(-(-tiles // part_tiles))]
        assert workspace.lse.isfinite().all(1).nonzero().flatten().tolist() == expected_parts
    else:
        assert workspace.lse.isnan().all()


@pytest.mark.parametrize(
    ("head_dim", "window", "mode", "held", "dtype"),
    with_dtypes((dim, min(window, 70), *rest) for dim, window, *rest in WITH_LARGE_HEADS),
)
def test_many_rows(
    head_dim: int,
    window: int,
    mode: DecodeMode,
    held: KVFormat | None,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than run at once, by one kernel; contexts end anywhere in a tile, past them the cache is NaN."""
    on_gpu = device.type == "cuda"
    lengths = [i * 37 % 150 for i in range(600 if on_gpu else 6)]
    paged, cache = held_as(make_paged(lengths, 2, head_dim, 16, dtype, device), held)
    q = fused_queries(len(lengths) + BEYOND, 4, head_dim, dtype).to(device)
    out = torch.full(q.shape, UNTOUCHED, dtype=dtype, device=device)
    workspace = poisoned_workspace(len(lengths), 4, head_dim, device)
    called = Mock(side_effect=hopper_decode)
    monkeypatch.setattr("quire.kernels.attention.hopper_decode.decode.hopper_decode", called)
    batch = paged.decodes(any_order(len(lengths), device), workspace)
    decode(q, out, batch, attention_layer(4, 2, head_dim, window), cache, mode, splits=1)
    torch.testing.assert_close(out.cpu().double(), expected(q, paged, window), atol=TOLERANCE[dtype], rtol=0)
    assert workspace.lse.isnan().all()  # none of the rows was divided
    stages = [call.args[9] for call in called.call_args_list]
    wanted = STAGES if head_dim <= 128 else STAGES_OF_HALVES
    assert stages == ([wanted] if of_hopper(dtype, held, device) else [])


@pytest.mark.parametrize("attention", [decode, decode_reference])
def test_a_batch_of_padding_writes_nothing(attention: Callable[..., None], device: torch.device) -> None:
    paged = make_paged([0, 0], 1, 64, 16, torch.float32, device)
    q = fused_queries(2, 2, 64, torch.float32).to(device)
    workspace = poisoned_workspace(2, 2, 64, device)
    out = torch.full(q.shape, UNTOUCHED, device=device)
    order = any_order(2, device)
    attention(q, out, paged.decodes(order, workspace), attention_layer(2, 1, 64), paged.cache())
    assert torch.equal(out.cpu(), torch.full((2, 2, 64), UNTOUCHED))


def test_small_workspace_is_refused(device: torch.device) -> None:
    paged = make_paged([5] * 4, 1, 64, 16, torch.float32, device)
    q = fused_queries(4, 2, 64, torch.float32).to(device)
    workspace = DecodeWorkspace(
        torch.empty(7, 2, 64, device=device),
        torch.empty(7, 2, device=device),
        torch.zeros(8, dtype=torch.int32, device=device),
        PrefixWorkspace.allocate(4, 2, 64, device),
    )
    with pytest.raises(ValueError, match="exceed the workspace"):
        batch = paged.decodes(any_order(4, device), workspace)
        decode(q, torch.empty_like(q), batch, attention_layer(2, 1, 64), paged.cache(), splits=2)


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
        decode(
            torch.zeros(q_shape, device=device),
            torch.zeros(q_shape, device=device),
            DecodeBatch(integers[None], integers, integers, integers, workspace),
            attention_layer(q_shape[1], kv_shape[2], q_shape[2]),
            LayerCache(torch.zeros(kv_shape, device=device), FP32),
        )


def test_scattered_heads_are_refused(device: torch.device) -> None:
    paged = make_paged([5], 1, 64, 16, torch.float32, device)
    q = torch.zeros(1, 64, 2, device=device).mT
    workspace = DecodeWorkspace.allocate(1, 2, 64, device)
    out = torch.zeros(q.shape, device=device)
    with pytest.raises(ValueError, match="contiguous within a token"):
        batch = paged.decodes(any_order(1, device), workspace)
        decode(q, out, batch, attention_layer(2, 1, 64), paged.cache())


def test_an_output_of_another_shape_is_refused(device: torch.device) -> None:
    paged = make_paged([5], 1, 64, 16, torch.float32, device)
    q = torch.zeros(1, 2, 64, device=device)
    workspace = DecodeWorkspace.allocate(1, 2, 64, device)
    with pytest.raises(ValueError, match="out must be contiguous"):
        batch = paged.decodes(any_order(1, device), workspace)
        decode(q, q[:, :1], batch, attention_layer(2, 1, 64), paged.cache())


def test_splits_that_would_crowd_the_device_are_spared(device):
    """Only Hopper's kernel leaves room: for two rows of 16 tiles and eight heads, in eight splits of two."""
    kv_heads = 8 if device.type == "cuda" else 1
    paged = make_paged([1000, 1001], kv_heads, 128, 16, torch.float16, device)
    q = torch.randn(2, kv_heads, 128, device=device).half()
    out = torch.empty_like(q)
    workspace = DecodeWorkspace.allocate(2, kv_heads, 128, device)
    batch = paged.decodes(any_order(2, device), workspace)
    left = decode_splits(q, out, batch, attention_layer(kv_heads, kv_heads, 128), paged.cache())
    assert left is not None and left.max_splits == 16
    assert left.sparing == ("room" if gpu_of(device).has_dependent_launch else None)
    left.merged()
    exact = decode_exactly(q, paged, 0)
    torch.testing.assert_close(out.cpu().double(), exact, atol=TOLERANCE[torch.float16], rtol=0)


@pytest.mark.parametrize("sparing", [None, "merging", "room"])
@pytest.mark.parametrize(("window", "splits"), [(0, 32), (512, 9), (1024, 17), (65, 2), (64, 2), (1, 1)])
def test_a_row_is_divided_by_what_it_reads(window, splits, sparing, device):
    """Tiles have 64 keys, and a window may begin within one; a sparing split has up to three of 32."""
    paged = make_paged([2032, 0], 1, 64, 16, torch.float16, device)  # and a block more in the table
    q = torch.randn(2, 4, 64, device=device).half()
    out, rows = torch.empty_like(q), paged.rows[:1]
    workspace = DecodeWorkspace.allocate(1, 4, 64, device)
    order = torch.zeros(1, dtype=torch.int32, device=device)
    batch = DecodeBatch(paged.block_tables, rows, paged.context_lens[:1], order, workspace)
    workspace.lse.fill_(torch.nan)
    layer = attention_layer(4, 1, 64, window)
    left = decode_splits(q, out, batch, layer, paged.cache(), sparing=sparing)
    used = (~workspace.lse[:, 0].isnan()).sum()
    spared = {None: {}, "merging": {32: 11, 17: 9}, "room": {32: 16, 17: 9, 9: 5, 2: 1}}[sparing]
    assert used == (0 if splits == 1 else spared.get(splits, splits))
    assert (1 if left is None else left.max_splits) == splits
    if left is not None:
        left.merged()
    exact = decode_exactly(q, paged, window)[:1]
    torch.testing.assert_close(out[:1].cpu().double(), exact, atol=TOLERANCE[torch.float16], rtol=0)
