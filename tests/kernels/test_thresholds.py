"""What min-p, top-k and top-p keep, against their definition in fp64 over small vocabularies."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.sampling.state import SamplingState
from quire.kernels.sampling.thresholds import keep_thresholds, keep_thresholds_reference

# Quarters are exact in every dtype and tie often.
LOGIT = st.one_of(st.integers(-24, 24).map(lambda i: i / 4), st.just(-math.inf))
ROW = st.lists(LOGIT, min_size=1, max_size=12).filter(lambda row: max(row) > -math.inf)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 1.0, 1.75]),
        "top_k": st.integers(0, 14),
        "top_p": st.sampled_from([1e-6, 0.3, 0.71, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.013, 0.21, 1.0]),
    }
)


def state_of(filters: dict[str, float], device: torch.device | str = "cpu") -> SamplingState:
    state = SamplingState.allocate(1, device)
    for name, value in filters.items():
        getattr(state, name)[0] = value
    return state


def kept_by_definition(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """The filters one after the other, as sets of tokens."""
    weights = {i: math.exp((x - max(row)) / temperature) for i, x in enumerate(row)}
    kept = {i for i, weight in weights.items() if weight >= min_p}
    ordered = sorted((row[i] for i in kept), reverse=True)
    if top_k:
        kept = {i for i in kept if row[i] >= ordered[min(top_k, len(ordered)) - 1]}
    if top_p < 1:
        total, mass = sum(weights[i] for i in kept), 0.0
        for value in sorted({row[i] for i in kept}, reverse=True):
            nucleus = {i for i in kept if row[i] >= value}
            mass = sum(weights[i] for i in nucleus)
            if mass >= top_p * total:
                return nucleus
    return kept


@settings(max_examples=300, deadline=None)
@given(ROW, FILTERS)
def test_reference_keeps_what_the_definition_keeps(row, filters):
    threshold = keep_thresholds_reference(torch.tensor([row]), state_of(filters))
    kept = {i for i, x in enumerate(row) if x >= threshold.item()}
    assert kept == kept_by_definition(row, **filters)


@settings(max_examples=12, deadline=None)
@given(ROW, FILTERS)
def test_kernel_keeps_what_the_definition_keeps(row, filters):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    logits = torch.tensor([row], device=device, dtype=torch.float16)  # 16 bits halve the search's passes
    threshold = keep_thresholds(logits, rows, state_of(filters, device))
    kept = {i for i, x in enumerate(row) if x >= threshold.item()}
    assert kept == kept_by_definition(row, **filters)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 5000},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"top_k": 300, "top_p": 0.8, "min_p": 0.001},
        {},
    ],
    ids=str,
)
def test_kernel_equals_reference_on_many_tokens(filters, device, dtype):
    logits = (3 * torch.randn(1, 5000, generator=torch.Generator().manual_seed(1))).to(device, dtype)
    state = state_of({"temperature": 0.8} | filters, device)
    result = keep_thresholds(logits, torch.zeros(1, dtype=torch.int32, device=device), state)
    expected = keep_thresholds_reference(logits, state)
    kept = (logits.float() >= result[0]).sum()
    assert kept == (logits.float() >= expected[0]).sum()
    if not filters:
        assert result.item() == -math.inf


@pytest.mark.parametrize("fill", [math.nan, -math.nan, math.inf, -math.inf])
def test_rows_without_a_meaning_end(fill, device):
    state = state_of({"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1}, device)
    logits = torch.full((1, 8), fill, device=device)
    assert keep_thresholds(logits, torch.zeros(1, dtype=torch.int32, device=device), state).shape == (1,)
