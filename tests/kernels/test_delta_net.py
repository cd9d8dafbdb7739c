"""Delta nets' rule with all around it: the same as decays and betas first, then the rule, then the norm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from state_steps import BLOCKS, draw_step, step_of
from torch import Tensor

from quire.kernels.pointwise.gated_norm import GatedNorm
from quire.kernels.recurrence import delta_net as nets
from quire.kernels.recurrence.delta_net import delta_net, delta_net_reference
from quire.kernels.recurrence.step import NO_STATE, PADS, StateStep

HEADS, KEY_HEADS, KEYS, VALUES = 4, 2, 24, 48
# Of the largest number: chunks' factors are rounded to 16 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw(tokens: int, dtype: torch.dtype, device: torch.device, *, by_key: bool) -> tuple[Tensor, ...]:
    """Draw what tokens have, as parts of two products, weights, and states."""
    sizes, decays = [KEY_HEADS * KEYS] * 2 + [HEADS * VALUES], HEADS * (KEYS if by_key else 1)
    mixed = torch.randn(tokens, sum(sizes) + 8, device=device).to(dtype).split([*sizes, 8], 1)
    q, k, v = (part.unflatten(1, (-1, dim)) for part, dim in zip(mixed, (KEYS, KEYS, VALUES), strict=False))
    b, a = torch.randn(tokens, HEADS + decays, device=device).to(dtype).split([HEADS, decays], 1)
    a_log, dt_bias = torch.randn(HEADS, device=device).to(dtype), torch.randn(decays, device=device).to(dtype)
    return q, k, v, a, b, a_log, dt_bias, torch.randn(BLOCKS, HEADS, KEYS, VALUES, device=device)


def draw_norm(
    tokens: int, dtype: torch.dtype, device: torch.device, which: int = 0
) -> tuple[Tensor, GatedNorm]:
    """Draw a gate, as a part of a product, and a norm of one of the kinds there are."""
    gate = torch.randn(tokens, HEADS * VALUES + 8, device=device).to(dtype)[:, :-8]
    weight = torch.rand(VALUES, device=device).to(dtype).repeat(HEADS)
    return gate, GatedNorm(weight, 1e-3, HEADS, ("silu", "sigmoid")[which % 2], which > 1)


def only_decodes(device: torch.device) -> StateStep:
    """Return a step that goes on in place, into another block, from nothing, and has one that pads."""
    return step_of([(0, 0), (1, 2), (NO_STATE, 3), (1, PADS)], [], device)


@pytest.mark.parametrize(
    ("by_key", "most", "which"), [(False, 1.0, 0), (True, 2.0, 1), (False, 1.0, 2), (True, 2.0, 3)]
)
def test_kernels_equal_the_reference(by_key, most, which, dtype, device, monkeypatch):
    drawn = draw_step(device)
    if which % 3:
        monkeypatch.setattr(nets, "MOST_ALONE", 0)
    for step, owned in ((only_decodes(device), slice(3)), (drawn.step, drawn.owned)):
        tokens = 4 if step is not drawn.step else drawn.tokens
        *given, a_log, dt_bias, state = draw(tokens, dtype, device, by_key=by_key)
        expected_state = state.clone()
        further = (a_log, dt_bias, most), *draw_norm(tokens, dtype, device, which)
        expected = delta_net_reference(*given, *further, expected_state, step)
        out = delta_net(*given, *further, state, step)
        assert out.dtype == dtype
        for ours, theirs in ((out[owned], expected[owned]), (state, expected_state)):
            atol = TOLERANCE[dtype] * float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=atol)
        assert not out[(step.after == PADS).nonzero()[:, 0]].any()


@pytest.mark.parametrize("alone", [0, nets.MOST_ALONE])
def test_decodes_get_the_same_beside_chunks_that_begin_where_one_pads(alone, dtype, device, monkeypatch):
    """A step's last decode pads, and stands where the first token of a prompt is; by one kernel or two."""
    monkeypatch.setattr(nets, "MOST_ALONE", alone)
    decodes, begins = [(0, 0), (NO_STATE, 3), (NO_STATE, PADS)], [(2, 5, NO_STATE, 4)]
    *given, a_log, dt_bias, state = draw(7, dtype, device, by_key=False)
    further = (a_log, dt_bias, 1.0), *draw_norm(7, dtype, device)
    single, beside, prompt = (delta_net(*given, *further, state.clone(), step_of(*step, device)) for step in (
        (decodes, []), (decodes, begins), ([], begins)
    ))  # fmt: skip
    assert torch.equal(beside[:2], single[:2]) and torch.equal(beside[2:], prompt[2:])
    assert not single[2].any() and prompt[2:].all()


@pytest.mark.parametrize("function", [delta_net, delta_net_reference])
def test_what_does_not_fit_is_refused(function, device):
    q, k, v, a, b, a_log, dt_bias, state = draw(4, torch.float32, device, by_key=False)
    gate, norm = draw_norm(4, torch.float32, device)
    step = only_decodes(device)
    with pytest.raises(ValueError, match=r"a .*, b .*, a_log .* and dt_bias .* do not fit"):
        function(q, k, v, a, b, (a_log[1:], dt_bias, 1.0), gate, norm, state, step)
    for wrong in (gate[1:], gate[:, 1:]):
        with pytest.raises(ValueError, match=r"a gate .* do not fit values .*: expected"):
            function(q, k, v, a, b, (a_log, dt_bias, 1.0), wrong, norm, state, step)
    with pytest.raises(ValueError, match="a norm of 1 groups"):
        function(q, k, v, a, b, (a_log, dt_bias, 1.0), gate, replace(norm, groups=1), state, step)
