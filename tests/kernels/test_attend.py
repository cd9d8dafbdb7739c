"""Attention straight from the projection: by one kernel and by the pair of them, against the references."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from paged import TOLERANCE, attention_layer, make_paged, share_prefixes, with_dtypes
from products import gpu_here
from quantized import FP8, FP12, in_format

from quire.kernels.attention import attend
from quire.kernels.attention import splits as decode_splits
from quire.kernels.attention.batch import ForwardBatch
from quire.kernels.attention.cascade import SharedPrefixes, rows_of_cascade
from quire.kernels.attention.decode import DecodeKernel, DecodeMode, decode
from quire.kernels.attention.recipes import ATTEND, Attending
from quire.kernels.attention.splits import DecodeWorkspace, SplitPartials
from quire.kernels.formats.cache_spec import CacheSpec
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.gpu import gpu_of
from quire.kernels.linear.alone import add_normed_linear, add_normed_linear_reference
from quire.kernels.linear.linear import Linear, Matrix
from quire.kernels.linear.operations import reference_add
from quire.kernels.linear.recipes import PROJECT_OUT, Product
from quire.kernels.pointwise.norm import Norm
from quire.kernels.recipes import choose
from quire.kernels.shapes import LayerShape

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
    (2, 2, 64, 1, 0, True, True),
    (4, 1, 128, 4, 20, True, False),
]
SPLITS = [[None, 1], [3, 16], [8], [2, None], [1, 3], [16], [2], [1], [2], [None], [3]]
# Groups that leave the newest key no lane, and such as two of Hopper's programs share.
LARGE_GROUPS = [
    (16, 1, 128, 16, 0, True, True),
    (17, 1, 64, 16, 0, True, False),
    (48, 2, 128, 32, 20, True, True),
    (32, 1, 64, 64, 0, False, False),
]
# Heads that Hopper's programs hold as ones of 64 or 128.
PADDED_HEADS = [
    (4, 4, 96, 16, 0, True, True),
    (32, 1, 72, 64, 0, True, True),
    (3, 1, 112, 16, 20, True, False),
    (6, 2, 48, 16, 0, False, True),
]
# Heads that they multiply in halves.
HALVED_HEADS = [
    (4, 1, 256, 16, 0, True, True),
    (4, 2, 192, 64, 0, True, False),
    (16, 1, 256, 32, 20, True, True),
    (24, 1, 136, 16, 0, False, True),
]
if torch.cuda.is_available():
    SHAPES += LARGE_GROUPS + PADDED_HEADS + HALVED_HEADS
    SPLITS += [[None, 1, 2]] * len(LARGE_GROUPS + PADDED_HEADS + HALVED_HEADS)
LARGE = [i for i, shape in enumerate(SHAPES) if shape in LARGE_GROUPS]
LONG_ON_GPUS = [shape for shape in SHAPES[11:] if shape[4] == 0]  # by a window no row is long


def attending(qkv, batch, layer, cache, outputs: int, *, fused: bool) -> Attending:
    """The case of a layer whose output projection has so many outputs."""
    attended, none = layer.num_heads * layer.head_dim, Matrix(1, 1)
    kept = CacheSpec(layer.num_kv_heads, layer.head_dim, layer.window)
    shape = LayerShape(
        qkv.dtype, layer.num_heads, kept, none, Matrix(outputs, attended), none, none, gated=fused
    )
    step = batch.shape(cache.block_size)
    return Attending(gpu_here(qkv.device), shape, cache.format, step, fused=fused)


def decode_new_tokens(qkv, out, batch, layer, cache):
    """Write K and V and attend as layers do whose norms are kernels of their own."""
    case = attending(qkv, batch, layer, cache, 1, fused=False)
    with mock.patch.object(attend, "room_for", lambda *_: out):
        choose(ATTEND, case).run(qkv, batch, layer, cache)


def decode_new_tokens_reference(qkv, out, batch, layer, cache):
    with mock.patch.object(attend, "room_for", lambda *_: out):
        attend.attend_reference(qkv, batch, layer, cache)


def add_decoded(residual, output, qkv, batch, layer, cache):
    """Attend and project as layers do whose norms and sums are part of the products' kernels."""
    case = attending(qkv, batch, layer, cache, len(output.weight), fused=True)
    # What merges splits is of Triton's lower level, which no interpreter runs.
    table = ATTEND if qkv.is_cuda else ATTEND[1:]
    zeros = qkv.new_zeros(len(qkv), layer.num_heads, layer.head_dim)
    with mock.patch.object(attend, "room_for", lambda *_: zeros):
        attended = choose(table, case).run(qkv, batch, layer, cache)
    unmerged = isinstance(attended, SplitPartials)
    product = Product(case.gpu, qkv.dtype, len(qkv), output.matrix, fused=True, unmerged=unmerged)
    norm = torch.ones_like(residual[0])
    choose(PROJECT_OUT, product).run(residual, attended, output, norm, EPS)


def add_decoded_reference(residual, output, qkv, batch, layer, cache):
    attended = attend.attend_reference(qkv, batch, layer, cache)
    reference_add(residual, attended, output, torch.ones_like(residual[0]), EPS)


def normed_decoded(residual, output, qkv, batch, layer, cache):
    """Attend and project as layers do that norm what they add; leave the norm of the sum in its place."""
    case = attending(qkv, batch, layer, cache, len(output.weight), fused=True)
    table = ATTEND if qkv.is_cuda else ATTEND[1:]
    zeros = qkv.new_zeros(len(qkv), layer.num_heads, layer.head_dim)
    with mock.patch.object(attend, "room_for", lambda *_: zeros):
        attended = choose(table, case).run(qkv, batch, layer, cache)
    residual.copy_(add_normed_linear(residual, attended, output, *norms_of(residual)))


def normed_decoded_reference(residual, output, qkv, batch, layer, cache):
    attended = attend.attend_reference(qkv, batch, layer, cache)
    residual.copy_(add_normed_linear_reference(residual, attended, output, *norms_of(residual)))


def norms_of(residual):
    weight = torch.linspace(0.5, 1.5, residual.shape[1], device=residual.device)
    return Norm(weight, EPS), Norm(weight.to(residual.dtype), EPS)


class Step:
    """Decodes of many lengths, 0 among them; the cache has NaN where the newest tokens go."""

    def __init__(
        self,
        shape: tuple[int, int, int, int, int, bool, bool],
        dtype: torch.dtype,
        device: torch.device,
        longest: int = LONG,
    ) -> None:
        q_heads, kv_heads, head_dim, block_size, window, rotated, normed = shape
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
        self.layer = attention_layer(
            q_heads, kv_heads, head_dim, window, rope=rope, q_norm=q_norm, k_norm=k_norm, eps=EPS
        )
        self.order = torch.randperm(len(lengths)).int().to(device)
        self.workspace = DecodeWorkspace.allocate(len(lengths), q_heads, head_dim, device)

    def attend(
        self, splits: int | None, cache: LayerCache | None = None, by: DecodeKernel | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By the fused kernel -> (out, cache)."""
        out = self.out.clone()
        cache = cache or self.paged.cache(self.paged.kv.clone())
        q = self.layer.queries(self.qkv)
        batch = self.paged.decodes(self.order, self.workspace)
        decode(q, out, batch, self.layer, cache, DecodeMode.NEW, splits, by=by)
        return out, cache.kv

    def run(
        self, function, shared=None, cache: LayerCache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By `decode_new_tokens` or its reference, on copies -> (out, cache)."""
        out, cache = self.out.clone(), cache or self.paged.cache(self.paged.kv.clone())
        self.last_qkv = self.qkv.clone()
        batch = ForwardBatch(
            self.positions, self.positions, self.slots, self.paged.decodes(self.order, self.workspace, shared)
        )
        function(self.last_qkv, out, batch, self.layer, cache)
        return out, cache.kv


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


# (shape, splits, format)
LITTLE = [
    (shape, splits, held)
    for shape in ((4, 2, 64, 32, 0, True, True), (8, 2, 128, 16, 100, True, False))
    for splits in ((2, 16) if torch.cuda.is_available() else (2,))
    for held in (None, FP12)
]
if torch.cuda.is_available():  # fp12 has no heads of such sizes
    LITTLE += [(shape, splits, None) for shape in PADDED_HEADS for splits in (2, 16)]


@pytest.mark.parametrize(("shape", "splits", "held", "dtype"), with_dtypes(LITTLE))
def test_splits_in_little_shared_memory(shape, splits, held, dtype, device):
    """Each of one tile, or of several that take turns in it."""
    step = Step(shape, dtype, device, longest=1300 if device.type == "cuda" else LONG)
    types = (torch.bfloat16, torch.float16) if held is None else (torch.bfloat16,)
    hopper = gpu_of(device).has_dependent_launch and dtype in types
    by = DecodeKernel.HOPPER_SMALL if hopper else DecodeKernel.SPLIT_SMALL
    if held is None:
        got, expected = step.attend(splits, by=by), step.run(decode_new_tokens_reference)
    else:
        _, cache = in_format(step.paged, held)
        out, _ = step.attend(splits, cache, by)
        got = out, read_newest(step, cache)
        expected = run_over_fp12(step, decode_new_tokens_reference)
    for one, other in zip(got, expected, strict=True):
        assert_alike(one, other, dtype if held is None else torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    with_dtypes((shape,) for shape in (SHAPES[0], SHAPES[8], (4, 2, 64, 32, 600, True, True), *LONG_ON_GPUS)),
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


def test_fp32_norms_of_heads_are_multiplied_before_rounding(device, dtype):
    """By all of the kernels: keys are the same, whichever wrote them."""
    step = Step((4, 2, 64, 16, 0, False, True), dtype, device)
    q_norm, k_norm = torch.randn(2, 64, device=device)
    step.layer = replace(step.layer, q_norm=q_norm, k_norm=k_norm)
    out, kv = step.attend(None)
    expected_out, expected_kv = step.run(decode_new_tokens_reference)
    assert_alike(out, expected_out, dtype)
    assert_alike(kv, expected_kv, dtype)
    newest = [(slot // 16, slot % 16) for slot in step.slots.tolist() if slot >= 0]
    pairs = [(kv[block, 0, :, at], expected_kv[block, 0, :, at]) for block, at in newest]
    same = torch.stack([ours == theirs for ours, theirs in pairs])
    assert dtype == torch.float32 or float(same.float().mean()) > 0.99


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


# (tokens' context lengths, q heads, kv heads, head dim, window, outputs): projections that merge a token's
# splits themselves, of one round of them, several and ragged ones, and such as do not
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
if torch.cuda.is_available():  # the last three have splits of two tiles, of three and of four
    OUTPUT_SHAPES += [([0], 8, 2, 64, 0, 64), ([700], 8, 4, 128, 0, 64), ([1500], 16, 8, 128, 100, 64)]
    OUTPUT_SHAPES += [([length], 16, 8, 128, 0, 64) for length in (1500, 2100, 3700)]


class Output:
    """Decodes of some lengths, and the projection of what they attend to, added to a residual."""

    def __init__(self, shape, dtype, device, *, biased: bool) -> None:
        lengths, heads, kv_heads, head_dim, window, outputs = shape
        if device.type == "cpu" or dtype == torch.float32:  # several tokens are for tensor cores
            lengths = lengths[:1]
        torch.manual_seed(0)
        count = len(lengths)
        self.paged = make_paged(lengths, kv_heads, head_dim, 16, dtype, device)
        self.qkv = torch.randn(count, (heads + 2 * kv_heads) * head_dim).to(device, dtype)
        self.residual = torch.randn(count, outputs).to(device, dtype)
        columns = heads * head_dim
        weight = (torch.randn(outputs, columns) * columns**-0.5).to(device, dtype)
        self.output = Linear(weight, torch.randn(outputs).to(device, dtype) if biased else None)
        self.layer = attention_layer(heads, kv_heads, head_dim, window, eps=EPS)
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

    def run(self, function) -> torch.Tensor:
        """By `add_decoded` or its reference -> residual."""
        paged, residual = self.paged, self.residual.clone()
        order = torch.arange(len(residual), dtype=torch.int32, device=residual.device)
        decodes = paged.decodes(order, self.workspace)
        batch = ForwardBatch(self.positions, self.positions, self.slots, decodes)
        cache = paged.cache(paged.kv.clone())
        function(residual, self.output, self.qkv.clone(), batch, self.layer, cache)
        return residual


# In the interpreter every other one has a bias.
BIASED_SHAPES = [
    (shape, biased)
    for i, shape in enumerate(OUTPUT_SHAPES)
    for biased in ((False, True) if torch.cuda.is_available() else (i % 2 == 1,))
]


@pytest.mark.parametrize(("shape", "biased", "dtype"), with_dtypes(BIASED_SHAPES))
def test_add_decoded(shape, biased, dtype, device):
    step = Output(shape, dtype, device, biased=biased)
    expected, got = step.run(add_decoded_reference), step.run(add_decoded)
    there = step.paged.context_lens > 0  # nobody looks at the others
    assert_alike(got[there], expected[there], dtype)
    assert torch.isfinite(got).all()


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
    members = torch.full((1, rows_of_cascade(2)), -1, dtype=torch.int32, device=device)
    members[0, :2] = torch.tensor([5, 6])
    cascade_of = torch.full((len(step.lengths),), -1, dtype=torch.int32, device=device)
    cascade_of[5:7] = 0
    shared = SharedPrefixes(members, cascade_of, torch.tensor([64], dtype=torch.int32, device=device))
    step.workspace.prefix.lse.fill_(torch.nan)
    for got, expected in zip(
        step.run(decode_new_tokens, shared), step.run(decode_new_tokens_reference), strict=True
    ):
        assert_alike(got, expected, dtype)
    assert step.workspace.prefix.lse.isfinite().any()  # they were not attended to by each row for itself


def read_newest(step: Step, cache: LayerCache) -> torch.Tensor:
    """What an fp12 cache holds in the blocks of the newest tokens."""
    blocks = (step.slots[step.slots >= 0] // cache.block_size)[:, None, None]
    parts = torch.arange(2, device=blocks.device)[:, None]
    return cache.read((blocks, parts, torch.arange(cache.kv_heads, device=blocks.device)))


def run_over_fp12(step: Step, function) -> tuple[torch.Tensor, torch.Tensor]:
    """By `decode_new_tokens` or its reference -> (out, what the cache holds in the newest tokens' blocks)."""
    _, cache = in_format(step.paged, FP12)
    out, _ = step.run(function, cache=cache)
    return out, read_newest(step, cache)


@pytest.mark.parametrize(
    ("full_device", "shape", "dtype"),
    with_dtypes((full_device, SHAPES[i]) for full_device in (0, 1 << 10) for i in (0, 2, 5, 7, 8, *LARGE)),
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
        for i, plans in ((0, (1, 3)), (2, (16,)), (5, (16,)), (7, (1, 2)), *((i, (1, 2)) for i in LARGE))
        for splits in plans
    ),
)
def test_splits_over_an_fp12_cache(shape, splits, dtype, device):
    step = Step(shape, dtype, device)
    _, cache = in_format(step.paged, FP12)
    out, _ = step.attend(splits, cache)
    expected = run_over_fp12(step, decode_new_tokens_reference)
    for one, other in zip((out, read_newest(step, cache)), expected, strict=True):
        assert_alike(one, other, torch.bfloat16)


@pytest.mark.parametrize("large", [torch.inf, 65408.0])
@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        (SHAPES[5], 1),
        (SHAPES[5], 16),
        ((4, 1, 128, 16, 0, False, False), 1),
        *((shape, 1) for shape in (SHAPES[i] for i in LARGE) if not any(shape[5:])),
    ],
)
def test_an_fp12_cache_gets_what_rounding_gives_and_nothing_else(shape, splits, large, dtype, device):
    """Bit by bit, of heads that are neither normalised nor rotated; one value has what is too large."""
    step = Step(shape, dtype, device)
    _, kv_heads, head_dim, *_ = shape
    step.qkv[3, -1] = large
    held, cache = in_format(step.paged, FP12)
    assert cache.scales is not None
    expected, expected_scales = held.kv.clone(), cache.scales.clone()
    newest = step.qkv.unflatten(1, (-1, head_dim))[:, -2 * kv_heads :].unflatten(1, (2, kv_heads))
    planes, scales = FP12.quantize(newest)
    for token, slot in enumerate(step.slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, held.kv.shape[3])
            expected[block, :, :, offset] = planes[token]
            expected_scales[block, :, offset] = scales[token].mT
    out, _ = step.attend(splits, cache)
    finite = [token for token in range(len(step.lengths)) if token != 3]
    wanted, _ = run_over_fp12(step, decode_new_tokens_reference)  # which attends to what it has written
    torch.testing.assert_close(out[finite], wanted[finite], atol=TOLERANCE[dtype], rtol=0)
    assert out[3, -shape[0] // kv_heads :].isnan().all()
    broken = expected_scales.isnan()
    assert torch.equal(cache.scales.isnan(), broken) and broken.any()
    torch.testing.assert_close(cache.scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    whole = ~broken.permute(0, 3, 1, 2)
    assert torch.equal(held.kv[whole], expected[whole])


def test_new_heads_are_refused_where_they_cannot_be_taken(device):
    step = Step(SHAPES[0], torch.float32, device)
    paged, out, q = step.paged, step.out, step.layer.queries(step.qkv)
    batch = paged.decodes(step.order, step.workspace)
    with pytest.raises(ValueError, match="k and v beside q"):
        decode(q.contiguous(), out, batch, step.layer, paged.cache(), DecodeMode.NEW)
    fp8 = torch.zeros(paged.kv.shape, device=device).to(FP8.dtype)
    scales = torch.zeros(*fp8[:, 0, ..., 0].shape, 2, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="not for a cache in fp8"):
        decode(q, out, batch, step.layer, LayerCache(fp8, FP8, scales), DecodeMode.NEW)


@pytest.mark.parametrize(("shape", "biased", "dtype"), with_dtypes(BIASED_SHAPES))
def test_norms_of_what_is_decoded(shape, biased, dtype, device):
    step = Output(shape, dtype, device, biased=biased)
    there = step.paged.context_lens > 0
    expected = step.run(normed_decoded_reference)[there].float()
    apart = (step.run(normed_decoded)[there].float() - expected).norm(dim=1)
    assert (apart <= TOLERANCE[dtype] * expected.norm(dim=1)).all()
