"""The gated delta rule: its definition token by token is the measure, and transformers' own code."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from paged import with_dtypes
from state_steps import BLOCKS, draw_step, in_turn
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from quire.kernels.recurrence import delta_chunks
from quire.kernels.recurrence.delta_products import inverse
from quire.kernels.recurrence.delta_rule import gated_delta_rule, gated_delta_rule_reference
from quire.kernels.recurrence.step import CARRIED, CHUNK, NO_STATE, StateStep

# Of the largest number: chunks' factors are rounded to 16 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Drawn(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Shape(NamedTuple):
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw(tokens: int, shape: Shape, dtype: torch.dtype, device: torch.device, *, by_key: bool) -> Drawn:
    """Draw what a layer's tokens have, in rows that lie apart, as parts of one product do."""
    sizes = (shape.key_heads * shape.key_dim,) * 2 + (shape.heads * shape.value_dim,)
    mixed = torch.randn(tokens, sum(sizes) + 8, device=device).to(dtype)
    parts = (part.unflatten(1, (-1, dim)) for part, dim in zip(
        mixed.split([*sizes, 8], 1), (shape.key_dim, shape.key_dim, shape.value_dim), strict=False
    ))  # fmt: skip
    decays = (shape.heads, shape.key_dim) if by_key else (shape.heads,)
    g = -F.softplus(2 * torch.randn(tokens, *decays, device=device) - 2)
    return Drawn(*parts, g, torch.rand(tokens, shape.heads, device=device).to(dtype))


def states(shape: Shape, device: torch.device) -> Tensor:
    return torch.randn(BLOCKS, shape.heads, shape.key_dim, shape.value_dim, device=device)


def assert_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    atol = TOLERANCE[dtype] * float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=atol)


# In the interpreter each shape, and each kind of decays, has both types.
@pytest.mark.parametrize(
    ("shape", "by_key", "dtype"),
    with_dtypes(
        [
            (Shape(2, 4, 32, 32), False),
            (Shape(2, 4, 32, 32), True),
            (Shape(1, 1, 24, 48), True),
            (Shape(1, 1, 24, 48), False),
        ]
    ),
)
def test_a_step_of_all_kinds(shape, by_key, dtype, device):
    drawn = draw_step(device)
    tokens = draw(drawn.tokens, shape, dtype, device, by_key=by_key)
    before = states(shape, device)
    around = torch.cat([before[-1:], before])  # with a block ahead of the first
    state, expected_state = around[1:], before.clone()
    expected = gated_delta_rule_reference(*tokens, expected_state, drawn.step, normalised=True)
    out = gated_delta_rule(*tokens, state, drawn.step, normalised=True)
    assert out.dtype == dtype
    assert_close(out[drawn.owned], expected[drawn.owned], dtype)
    assert not out[drawn.padding].any() and not expected[drawn.padding].any()
    assert_close(state, expected_state, dtype)
    assert torch.equal(state[drawn.others], before[drawn.others]) and torch.equal(around[0], before[-1])


def test_products_may_be_of_a_few_chunks_at_a_time(device, monkeypatch):
    drawn = draw_step(device)
    tokens = draw(drawn.tokens, Shape(2, 4, 32, 32), torch.float32, device, by_key=False)
    state = states(Shape(2, 4, 32, 32), device)
    whole_state, parts_state = state.clone(), state.clone()
    whole = gated_delta_rule(*tokens, whole_state, drawn.step, normalised=True)
    monkeypatch.setattr(delta_chunks, "MOST_TOGETHER", 2)  # the second chunk of a part is carried to the next
    parts = gated_delta_rule(*tokens, parts_state, drawn.step, normalised=True)
    assert torch.equal(parts[drawn.owned], whole[drawn.owned]) and torch.equal(parts_state, whole_state)


def one_sequence(tokens: int, device: torch.device, after: int = 1) -> StateStep:
    """Return a step of chunks of a whole sequence, which leaves its state in a block."""
    sizes = [CHUNK] * (tokens // CHUNK) + [tokens % CHUNK] * (tokens % CHUNK > 0)
    last = len(sizes) - 1
    chunks = ((size, CARRIED if i else NO_STATE, after if i == last else -1) for i, size in enumerate(sizes))
    return in_turn([], chunks, device).step


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("function", [gated_delta_rule, gated_delta_rule_reference])
@pytest.mark.parametrize(
    ("theirs", "shape"),
    [
        (qwen.torch_recurrent_gated_delta_rule, Shape(2, 4, 16, 32)),
        (qwen.torch_chunk_gated_delta_rule, Shape(2, 4, 16, 32)),
        (kimi.recurrent_kimi_delta_attention, Shape(2, 2, 16, 16)),
        (kimi.chunk_kimi_delta_attention, Shape(2, 2, 16, 16)),
    ],
)
def test_it_is_what_transformers_computes(theirs, shape, function, normalised, device):
    tokens = CHUNK + 20
    drawn = draw(tokens, shape, torch.float32, device, by_key="kimi" in theirs.__name__)
    if not normalised:  # keys of length 1 or so, else states grow without end
        drawn = drawn._replace(k=0.2 * drawn.k)
    expected, last = theirs(
        *(x[None].cpu() for x in drawn), initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=normalised,
    )  # fmt: skip
    state = states(shape, device)
    out = function(*drawn, state, one_sequence(tokens, device), normalised=normalised)
    assert_close(out, expected[0].to(device), torch.float32)
    assert_close(state[1], last[0].to(device), torch.float32)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("decays", ["none", "strong", "both"])
def test_any_decay(decays, by_key, dtype, device):
    """No decay at all, or down to nothing from one token to the next: nothing is lost or without bounds."""
    tokens, shape = 2 * CHUNK, Shape(1, 1, 16, 16)
    drawn = draw(tokens, shape, dtype, device, by_key=by_key)
    strong = {"none": 0.0, "strong": 1.0, "both": torch.rand_like(drawn.g) < 0.3}[decays]
    drawn = drawn._replace(g=-100.0 * strong * torch.ones_like(drawn.g))
    state, expected_state = states(shape, device), states(shape, device)
    expected = gated_delta_rule_reference(
        *drawn, expected_state, one_sequence(tokens, device), normalised=True
    )
    out = gated_delta_rule(*drawn, state, one_sequence(tokens, device), normalised=True)
    assert_close(out, expected, dtype)
    assert_close(state[1], expected_state[1], dtype)


def test_long_runs_are_gone_through_in_parts(monkeypatch, dtype, device):
    """Of chunks that go on from one another: of more of them than a program looks at once."""
    monkeypatch.setattr(delta_chunks, "AHEAD", 2)
    tokens, shape = 4 * CHUNK + 5, Shape(1, 1, 16, 16)
    drawn = draw(tokens, shape, dtype, device, by_key=False)
    state, expected_state = states(shape, device), states(shape, device)
    expected = gated_delta_rule_reference(
        *drawn, expected_state, one_sequence(tokens, device), normalised=True
    )
    out = gated_delta_rule(*drawn, state, one_sequence(tokens, device), normalised=True)
    assert_close(out, expected, dtype)
    assert_close(state[1], expected_state[1], dtype)


@pytest.mark.parametrize("by_key", [False, True])
def test_a_sequence_has_the_same_numbers_whatever_is_beside_it(by_key, dtype, device):
    drawn, shape = draw_step(device), Shape(1, 2, 16, 16)
    tokens = draw(drawn.tokens, shape, dtype, device, by_key=by_key)
    before = states(shape, device)
    together, alone = before.clone(), before.clone()
    out = gated_delta_rule(*tokens, together, drawn.step, normalised=True)
    chunks = drawn.step.chunks[2:6].tolist()  # the first sequence's
    sequence, first = in_turn([], (chunk[1:] for chunk in chunks), device), chunks[0][0]
    for part, begin, blocks in ((in_turn([(1, 2)], [], device), 2, [2]), (sequence, first, [4, 5])):
        end = begin + part.tokens
        result = gated_delta_rule(*(x[begin:end] for x in tokens), alone, part.step, normalised=True)
        assert torch.equal(result, out[begin:end])
        assert torch.equal(alone[blocks], together[blocks])


def test_a_step_without_tokens_changes_nothing(device):
    shape = Shape(1, 2, 16, 16)
    before = states(shape, device)
    state = before.clone()
    none = torch.empty(0, dtype=torch.int32, device=device)
    step = StateStep(none, none, none.new_empty(0, 4))
    drawn = draw(0, shape, torch.float32, device, by_key=False)
    assert gated_delta_rule(*drawn, state, step, normalised=True).shape == (0, 2, 16)
    assert torch.equal(state, before)


@triton.jit
def _inverse_kernel(
    a_ptr: tl.tensor, out_ptr: tl.tensor, LEVELS: tl.constexpr, PRECISION: tl.constexpr
) -> None:
    ROWS: tl.constexpr = 1 << LEVELS
    places = tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(out_ptr + places, inverse(tl.load(a_ptr + places), LEVELS, PRECISION))


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_the_inverse_of_the_same_key_over_and_over(beta, precision, device):
    """Powers of that matrix have numbers of eighteen digits and more, and its inverse has none above 2."""
    a = torch.full((CHUNK, CHUNK), beta, device=device).tril(-1)
    a += 1e-3 * torch.randn_like(a).tril(-1)
    out = torch.empty_like(a)
    _inverse_kernel[(1,)](a, out, CHUNK.bit_length() - 1, precision)
    expected = torch.linalg.inv(torch.eye(CHUNK, dtype=torch.float64) + a.double().cpu())
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-4)
