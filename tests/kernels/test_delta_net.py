"""The delta rule with what decays and betas are of: the same as decays and betas first, and then the rule."""

from __future__ import annotations

import pytest
import torch
from paged import with_dtypes
from state_steps import BLOCKS, draw_step, step_of
from torch import Tensor

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


def only_decodes(device: torch.device) -> StateStep:
    """Return a step that goes on in place, into another block, from nothing, and has one that pads."""
    return step_of([(0, 0), (1, 2), (NO_STATE, 3), (1, PADS)], [], device)


@pytest.mark.parametrize(
    ("by_key", "most", "dtype"), with_dtypes([(False, 1.0), (False, 2.0), (True, 2.0), (True, 1.0)])
)
def test_kernels_equal_the_reference(by_key, most, dtype, device):
    drawn = draw_step(device)
    for step, owned in ((only_decodes(device), slice(3)), (drawn.step, drawn.owned)):
        tokens = 4 if step is not drawn.step else drawn.tokens
        *given, a_log, dt_bias, state = draw(tokens, dtype, device, by_key=by_key)
        expected_state = state.clone()
        gates = a_log, dt_bias, most
        expected = delta_net_reference(*given, gates, expected_state, step)
        out = delta_net(*given, gates, state, step)
        assert out.dtype == dtype
        for ours, theirs in ((out[owned], expected[owned]), (state, expected_state)):
            atol = TOLERANCE[dtype] * float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=atol)


@pytest.mark.parametrize("function", [delta_net, delta_net_reference])
def test_what_does_not_fit_is_refused(function, device):
    q, k, v, a, b, a_log, dt_bias, state = draw(4, torch.float32, device, by_key=False)
    with pytest.raises(ValueError, match=r"a .*, b .*, a_log .* and dt_bias .* do not fit"):
        function(q, k, v, a, b, (a_log[1:], dt_bias, 1.0), state, only_decodes(device))
