"""Attention straight from the projection: by one kernel and by the pair of them, against the references."""

import pytest
import torch
from paged import TOLERANCE, make_paged, share_prefixes, with_dtypes
from rounded import FP8, FP12, in_format

from quire.kernels.attention import splits as decode_splits
from quire.kernels.attention.cascade import SharedPrefixes, rows_of_bundle
from quire.kernels.attention.decode import decode_attention
from quire.kernels.attention.qk_norm_rope import NewHeads
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.decode_layer import (
    add_decoded,
    add_decoded_reference,
    decode_new_tokens,
    decode_new_tokens_reference,
)
from quire.kernels.formats.kv_format import quantize, read_cache
from quire.kernels.gpu import gpu_of
from quire.kernels.linear.split_output import MOST_TOKENS

EPS = 1e-6
UNTOUCHED = 7.0
# The interpreter takes its time for each tile of 64.
LONG = 453 if torch.cuda.is_available() else 140
LENGTHS = [66, 130, LONG] if torch.cuda.is_available() else [66, LONG]
# (q heads, kv heads, head dim, block size, window, rotated, normed)
SHAPES = [
    (2, 2, 64, 16, 0, True, True),
    (4, 2, 80, 32, 0, True, False),
    (4, 1, 128, 64, 0, False, True),
    (7, 1, 96, 128, 0, True, True),
    (8, 1, 64, 16, 1, True, False),
    (4, 2, 64, 32, 20, False, False),
    (2, 1, 64, 16, 64, True, True),
    (15, 1, 128, 16, 0, True, True),
    (1, 1, 128, 32, 0, True, True),
]
SPLITS = [[None, 1], [3, 16], [8], [2, None], [1, 3], [16], [2], [1], [2]]


class Step:
    """Decodes of many lengths, 0 among them; the cache has NaN where the newest tokens go."""

    def __init__(
        self,
        shape: tuple[int, int, int, int, int, bool, bool],
        dtype: torch.dtype,
        device: torch.device,
        longest: int = LONG,
    ) -> None:
        q_heads, kv_heads, head_dim, block_size, self.window, rotated, normed = shape
        self.lengths = lengths = [1, 0, block_size, block_size + 1, 65, *LENGTHS[:-1], longest]
        torch.manual_seed(0)
        self.paged = make_paged(lengths, kv_heads, head_dim, block_size, dtype, device)
        self.slots = torch.full((len(lengths),), -1)
        for i, length in enumerate(lengths):
            if length:
                block = int(self.paged.block_tables[self.paged.rows[i], (length - 1) // block_size])
                self.paged.kv[block, :, :, (length - 1) % block_size] = torch.nan
                self.slots[i] = block * block_size + (length - 1) % block_size
        self.slots = self.slots.to(device)
        width = (q_heads + 2 * kv_heads) * head_dim
        # Rows are strided, and hold NaN beside what is theirs.
        rows = torch.full((len(lengths), width + 16), torch.nan)
        rows[:, :width] = torch.randn(len(lengths), width)
        self.qkv = rows.to(device, dtype)[:, :width]
        self.out = torch.full((len(lengths), q_heads, head_dim), UNTOUCHED, dtype=dtype, device=device)
        self.positions = self.paged.context_lens.clamp(min=1) - 1
        rope = torch.rand(max(lengths), head_dim, device=device) * 2 - 1 if rotated else None
        q_norm, k_norm = torch.randn(2, head_dim).to(device, dtype) if normed else (None, None)
        self.heads = NewHeads(rope, q_norm, k_norm, EPS)
        self.order = torch.randperm(len(lengths)).int().to(device)
        self.workspace = DecodeWorkspace.allocate(len(lengths), q_heads, head_dim, device)
        self.scale = head_dim**-0.5

    def attend(
        self, splits: int | None, kv: torch.Tensor | None = None, kv_scales: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By the fused kernel -> (out, cache)."""
        paged, out = self.paged, self.out.clone()
        kv = paged.kv.clone() if kv is None else kv
        q = self.qkv[:, : out[0].numel()].unflatten(1, out.shape[1:])
        decode_attention(
            q, out, kv, paged.block_tables, paged.rows, paged.context_lens, self.order, self.scale,
            self.window, self.workspace, splits, kv_scales=kv_scales, new=self.heads,
        )  # fmt: skip
        return out, kv

    def run(self, function, shared=None) -> tuple[torch.Tensor, torch.Tensor]:
        """By `decode_new_tokens` or its reference, on copies -> (out, cache)."""
        paged, out, kv = self.paged, self.out.clone(), self.paged.kv.clone()
        self.last_qkv = self.qkv.clone()
        function(
            self.last_qkv, out, kv, self.positions, self.slots, paged.block_tables, paged.rows,
            paged.context_lens, self.order, self.heads, self.scale, self.window, self.workspace, shared, None,
        )  # fmt: skip
        return out, kv


def assert_alike(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        got.float(), expected.float(), atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype], equal_nan=True
    )


@pytest.mark.parametrize(
    ("shape", "splits", "dtype"),
    with_dtypes((shape, splits) for shape, plans in zip(SHAPES, SPLITS, strict=True) for splits in plans),
)
def test_fused_kernel_equals_the_references(shape, splits, dtype, device):
    step = Step(shape, dtype, device)
    expected_out, expected_kv = step.run(decode_new_tokens_reference)
    out, kv = step.attend(splits)
    assert_alike(out, expected_out, dtype)
    assert_alike(kv, expected_kv, dtype)
    empty = step.paged.context_lens == 0
    assert torch.all(out[empty] == UNTOUCHED) and torch.isfinite(out[~empty]).all()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    with_dtypes((shape,) for shape in (SHAPES[0], SHAPES[8], (4, 2, 64, 32, 600, True, True))),
)
def test_a_long_row_beside_short_ones(shape, dtype, device):
    """Hopper divides it, and its last part sees to the newest token."""
    step = Step(shape, dtype, device, longest=1300 if device.type == "cuda" else LONG)
    step.order = step.paged.context_lens.argsort(descending=True).int()
    step.workspace.lse.fill_(torch.nan)
    expected = step.run(decode_new_tokens_reference)
    for got, wanted in zip(step.attend(1), expected, strict=True):
        assert_alike(got, wanted, dtype)
    hopper = gpu_of(device).has_dependent_launch
    assert step.workspace.lse.isfinite().any() == (hopper and dtype != torch.float32)
    assert not step.workspace.arrivals.any()


def test_it_writes_what_the_cache_kernel_writes_and_nothing_else(device, dtype):
    step = Step(SHAPES[0], dtype, device)
    before = step.paged.kv
    _, kv = step.attend(None)
    _, expected = step.run(decode_new_tokens_reference)
    changed = ~torch.isclose(kv.float(), before.float(), rtol=0, atol=0, equal_nan=True).all(dim=-1)
    wanted = torch.zeros_like(changed)
    for slot in step.slots[step.slots >= 0].tolist():
        wanted[slot // 16, :, :, slot % 16] = True
    assert torch.equal(changed, wanted)
    assert_alike(kv, expected, dtype)


@pytest.mark.parametrize(
    ("full_device", "shape", "dtype"),
    with_dtypes(
        (full_device, shape)
        for full_device in (0, 1 << 10)
        for shape in ([SHAPES[0], SHAPES[2], SHAPES[6]] if torch.cuda.is_available() else SHAPES[:1])
    ),
)
def test_the_operation_fuses_few_rows(full_device, shape, device, dtype, monkeypatch):
    monkeypatch.setattr(decode_splits, "FULL_DEVICE", full_device)
    step = Step(shape, dtype, device)
    expected, got = step.run(decode_new_tokens_reference), step.run(decode_new_tokens)
    for one, other in zip(got, expected, strict=True):
        assert_alike(one, other, dtype)
    fused, _ = step.attend(None)
    assert torch.equal(step.last_qkv, step.qkv) == (full_device > 0)  # only the pair rewrites q
    if full_device:
        assert torch.equal(got[0], fused)


# (tokens' context lengths, q heads, kv heads, head dim, window, outputs): projections that merge splits
# themselves, of one round of them, several and ragged ones, and such as do not
OUTPUT_SHAPES = [
    ([1], 4, 2, 64, 0, 64),
    ([LONG], 8, 4, 128, 0, 24),
    ([130, 0], 8, 2, 64, 0, 64),
    ([65, 1500], 16, 8, 128, 100, 64),
    ([LONG, 1500], 16, 8, 128, 0, 64),
    ([1, 700], 8, 4, 128, 0, 64),
    ([LONG, 64, 70], 16, 8, 128, 0, 64),
    ([LONG], 3, 1, 64, 0, 40),
    ([LONG], 4, 2, 64, 0, 30),
]


class Output:
    """Decodes of some lengths, and the projection of what they attend to, added to a residual."""

    def __init__(self, shape, dtype, device, *, biased: bool) -> None:
        lengths, heads, kv_heads, head_dim, self.window, outputs = shape
        if device.type == "cpu" or dtype == torch.float32:  # several tokens are for tensor cores
            lengths = lengths[:1]
        torch.manual_seed(0)
        count = len(lengths)
        self.paged = make_paged(lengths, kv_heads, head_dim, 16, dtype, device)
        self.qkv = torch.randn(count, (heads + 2 * kv_heads) * head_dim).to(device, dtype)
        self.residual = torch.randn(count, outputs).to(device, dtype)
        columns = heads * head_dim
        self.weight = (torch.randn(outputs, columns) * columns**-0.5).to(device, dtype)
        self.bias = torch.randn(outputs).to(device, dtype) if biased else None
        self.heads = NewHeads(None, None, None, EPS)
        self.out_shape = (count, heads, head_dim)
        self.positions = self.paged.context_lens.clamp(min=1) - 1
        self.slots = torch.tensor(
            [
                int(self.paged.block_tables[self.paged.rows[i], (length - 1) // 16]) * 16 + (length - 1) % 16
                if length
                else -1
                for i, length in enumerate(lengths)
            ]
        ).to(device)
        self.workspace = DecodeWorkspace.allocate(count, heads, head_dim, device)
        self.workspace.partials.fill_(torch.nan)
        self.workspace.lse.fill_(torch.nan)

    def run(self, function, rows: slice = slice(None)) -> torch.Tensor:
        """By `add_decoded` or its reference, of some rows -> residual."""
        paged, residual = self.paged, self.residual[rows].clone()
        out = torch.zeros(self.out_shape, dtype=self.qkv.dtype, device=self.qkv.device)[rows]
        order = torch.arange(len(residual), dtype=torch.int32, device=residual.device)
        function(
            residual, self.weight, self.bias, self.qkv[rows].clone(), out, paged.kv.clone(),
            self.positions[rows], self.slots[rows], paged.block_tables, paged.rows[rows],
            paged.context_lens[rows], order, self.heads, self.out_shape[2] ** -0.5, self.window,
            self.workspace, None, None,
        )  # fmt: skip
        return residual


# In the interpreter every other one has a bias.
@pytest.mark.parametrize(
    ("shape", "biased"),
    [
        (shape, biased)
        for i, shape in enumerate(OUTPUT_SHAPES)
        for biased in ((False, True) if torch.cuda.is_available() else (i % 2 == 1,))
    ],
)
def test_add_decoded(shape, biased, dtype, device):
    step = Output(shape, dtype, device, biased=biased)
    expected, got = step.run(add_decoded_reference), step.run(add_decoded)
    there = step.paged.context_lens > 0  # nobody looks at the others
    assert_alike(got[there], expected[there], dtype)
    assert torch.isfinite(got).all()
    if 1 < len(got) <= MOST_TOKENS:  # who merges for each token by itself gives it what it has alone
        for row in range(len(got)):
            assert torch.equal(got[row : row + 1], step.run(add_decoded, slice(row, row + 1)))


def test_rows_that_share_prefixes(device, dtype):
    step = Step((4, 2, 64, 16, 0, True, True), dtype, device)
    paged = step.paged
    share_prefixes(paged, [[5, 6]], [64])
    step.slots[5:7] = torch.tensor(
        [
            int(paged.block_tables[paged.rows[i], last // 16]) * 16 + last % 16
            for i, last in ((5, step.lengths[5] - 1), (6, step.lengths[6] - 1))
        ]
    )
    members = torch.full((1, rows_of_bundle(2)), -1, dtype=torch.int32, device=device)
    members[0, :2] = torch.tensor([5, 6])
    bundle_of = torch.full((len(step.lengths),), -1, dtype=torch.int32, device=device)
    bundle_of[5:7] = 0
    shared = SharedPrefixes(members, bundle_of, torch.tensor([64], dtype=torch.int32, device=device))
    step.workspace.prefix.lse.fill_(torch.nan)
    for got, expected in zip(
        step.run(decode_new_tokens, shared), step.run(decode_new_tokens_reference), strict=True
    ):
        assert_alike(got, expected, dtype)
    assert step.workspace.prefix.lse.isfinite().any()  # they were not attended to by each row for itself


def read_newest(step: Step, kv: torch.Tensor, kv_scales: torch.Tensor) -> torch.Tensor:
    """What an fp12 cache holds in the blocks of the newest tokens."""
    blocks = (step.slots[step.slots >= 0] // kv.shape[3])[:, None, None]
    parts = torch.arange(2, device=kv.device)[:, None]
    return read_cache(kv, kv_scales, (blocks, parts, torch.arange(kv.shape[2], device=kv.device)))


def run_over_fp12(step: Step, function) -> tuple[torch.Tensor, torch.Tensor]:
    """By `decode_new_tokens` or its reference -> (out, what the cache holds in the newest tokens' blocks)."""
    held, kv_scales = in_format(step.paged, FP12)
    out, paged = step.out.clone(), step.paged
    step.last_qkv = step.qkv.clone()
    function(
        step.last_qkv, out, held.kv, step.positions, step.slots, paged.block_tables, paged.rows,
        paged.context_lens, step.order, step.heads, step.scale, step.window, step.workspace, None, kv_scales,
    )  # fmt: skip
    return out, read_newest(step, held.kv, kv_scales)


@pytest.mark.parametrize(
    ("full_device", "shape", "dtype"),
    with_dtypes((full_device, SHAPES[i]) for full_device in (0, 1 << 10) for i in (0, 2, 5, 7, 8)),
)
def test_over_an_fp12_cache(full_device, shape, dtype, device, monkeypatch):
    """By one kernel, or by one that writes and one that begins beside it; a row's keys have a NaN."""
    monkeypatch.setattr(decode_splits, "FULL_DEVICE", full_device)
    step = Step(shape, dtype, device)
    paged, last, window = step.paged, len(step.lengths) - 1, shape[4]
    paged.kv[paged.block_tables[paged.rows[last], 0], 0, 0, 3, 5] = torch.nan
    expected, got = run_over_fp12(step, decode_new_tokens_reference), run_over_fp12(step, decode_new_tokens)
    rewritten = full_device == 0 and any(shape[5:])  # only the pair rewrites q
    assert torch.equal(step.last_qkv, step.qkv) != rewritten
    for one, other in zip(got, expected, strict=True):
        assert_alike(one, other, torch.bfloat16)  # a last bit may decide which way a number is rounded
    out = got[0]
    seen = window == 0 or step.lengths[last] - 4 < window
    assert out[last, : shape[0] // shape[1]].isnan().all() == seen
    assert out[:last].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "splits", "dtype"),
    with_dtypes(
        (SHAPES[i], splits)
        for i, plans in ((0, (1, 3)), (2, (16,)), (5, (16,)), (7, (1, 2)))
        for splits in plans
    ),
)
def test_splits_over_an_fp12_cache(shape, splits, dtype, device):
    step = Step(shape, dtype, device)
    held, kv_scales = in_format(step.paged, FP12)
    out, _ = step.attend(splits, held.kv, kv_scales)
    expected = run_over_fp12(step, decode_new_tokens_reference)
    for one, other in zip((out, read_newest(step, held.kv, kv_scales)), expected, strict=True):
        assert_alike(one, other, torch.bfloat16)


@pytest.mark.parametrize("large", [torch.inf, 65408.0])
@pytest.mark.parametrize(
    ("shape", "splits"), [(SHAPES[5], 1), (SHAPES[5], 16), ((4, 1, 128, 16, 0, False, False), 1)]
)
def test_an_fp12_cache_gets_what_rounding_gives_and_nothing_else(shape, splits, large, dtype, device):
    """Bit by bit, of heads that are neither normalised nor rotated; one value has what is too large."""
    step = Step(shape, dtype, device)
    _, kv_heads, head_dim, *_ = shape
    step.qkv[3, -1] = large
    held, kv_scales = in_format(step.paged, FP12)
    expected, expected_scales = held.kv.clone(), kv_scales.clone()
    newest = step.qkv.unflatten(1, (-1, head_dim))[:, -2 * kv_heads :].unflatten(1, (2, kv_heads))
    planes, scales = quantize(newest, FP12)
    for token, slot in enumerate(step.slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, held.kv.shape[3])
            expected[block, :, :, offset] = planes[token]
            expected_scales[block, :, offset] = scales[token].mT
    out, _ = step.attend(splits, held.kv, kv_scales)
    finite = [token for token in range(len(step.lengths)) if token != 3]
    wanted, _ = run_over_fp12(step, decode_new_tokens_reference)  # which attends to what it has written
    torch.testing.assert_close(out[finite], wanted[finite], atol=TOLERANCE[dtype], rtol=0)
    assert out[3, -shape[0] // kv_heads :].isnan().all()
    broken = expected_scales.isnan()
    assert torch.equal(kv_scales.isnan(), broken) and broken.any()
    torch.testing.assert_close(kv_scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    whole = ~broken.permute(0, 3, 1, 2)
    assert torch.equal(held.kv[whole], expected[whole])


def test_new_heads_are_refused_where_they_cannot_be_taken(device):
    step = Step(SHAPES[0], torch.float32, device)
    paged, out = step.paged, step.out
    q = step.qkv[:, : out[0].numel()].unflatten(1, out.shape[1:])
    arguments = (
        paged.block_tables,
        paged.rows,
        paged.context_lens,
        step.order,
        step.scale,
        0,
        step.workspace,
    )
    with pytest.raises(ValueError, match="k and v beside q"):
        decode_attention(q.contiguous(), out, paged.kv, *arguments, new=step.heads)
    fp8 = torch.zeros(paged.kv.shape, device=device).to(FP8)
    scales = torch.zeros(*fp8[:, 0, ..., 0].shape, 2, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="not for a cache in fp8"):
        decode_attention(q, out, fp8, *arguments, kv_scales=scales, new=step.heads)
