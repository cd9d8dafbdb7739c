"""Sampling: the kernel against the reference, the draws against the softmax, and what a token depends on."""

import math

import pytest
import torch

from quire.kernels.sampling.sample import sample, sample_reference
from quire.kernels.sampling.state import SamplingState
from quire.kernels.sampling.thresholds import keep_thresholds_reference

ROWS = [  # one device row of each kind
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": -(1 << 63), "top_p": 0.9},
    {"temperature": 1.3, "seed": (1 << 63) - 1, "top_k": 7, "index": 3},
    {"temperature": 0.9, "seed": 1 << 40, "min_p": 0.05},
    {"temperature": 2.0, "seed": 12345, "top_p": 0.5, "top_k": 50, "min_p": 0.001},
    {"temperature": 1e-30, "seed": 5, "top_p": 0.9},
]
IMPLEMENTATIONS = [sample, sample_reference]
UNTOUCHED = -7


def state_of(rows: list[dict[str, float]], device: torch.device) -> SamplingState:
    state = SamplingState.allocate(len(rows) + 1, device)
    for row, values in enumerate(rows):
        for name, value in values.items():
            getattr(state, name)[row] = value
    return state


def random_logits(samples: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return (4 * torch.randn(samples, vocabulary, generator=generator)).to(device, dtype)


def draw(function, logits, rows, positions, state) -> list[int]:
    def indices(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=logits.device)

    last_tokens = torch.full_like(state.top_k, UNTOUCHED)
    tokens = function(logits, indices(rows), indices(positions), state, last_tokens).tolist()
    known = dict(enumerate(last_tokens.tolist()))
    for row, last in known.items():
        drawn = {max(token, 0) for of, token in zip(rows, tokens, strict=True) if of == row}
        assert last in (drawn or {UNTOUCHED})
    return tokens


@pytest.mark.parametrize("vocabulary", [1, 300, 4099])
def test_kernel_equals_reference(vocabulary, device, dtype):
    state = state_of(ROWS, device)
    rows = [*range(len(ROWS) + 1), 3]  # the last state row is padding's
    logits = random_logits(len(rows), vocabulary, device, dtype)
    positions = [10 * row for row in rows[:-1]] + [4_000_000]
    expected = draw(sample_reference, logits, rows, positions, state)
    assert draw(sample, logits, rows, positions, state) == expected
    assert expected[0] == logits[0].argmax()


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_a_token_depends_on_its_seed_index_and_position_alone(function, device):
    logits = torch.zeros(1, 3000, device=device)
    base = {"temperature": 1.0, "seed": 9, "index": 0}
    state = state_of([base, {}, base, base | {"seed": 10}, base | {"index": 1}], device)
    alone = draw(function, logits, [0], [5], state)
    assert draw(function, logits.expand(4, -1), [1, 2, 0, 4], [0, 5, 6, 5], state)[1] == alone[0]
    others = draw(function, logits.expand(3, -1), [3, 4, 0], [5, 5, 6], state)
    assert len({alone[0], *others}) == 4


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_greedy_ties_go_to_the_lowest_id(function, device, dtype):
    logits = torch.zeros(3, 5000, device=device).to(dtype)
    logits[1, [700, 4999]] = 2.0
    logits[2, [2047, 2048]] = 1.0
    assert draw(function, logits, [0, 0, 0], [0, 1, 2], state_of([{}], device)) == [0, 700, 2047]


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
@pytest.mark.parametrize("row", [0, 1, 4])
def test_rows_that_cannot_be_sampled_give_minus_one(function, row, device, dtype):
    logits = random_logits(6, 2100, device, dtype)
    logits[0, 2090] = math.nan
    logits[1, 1] = -math.nan
    logits[2, 2099] = math.inf
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[4, 1234] = -5.0
    tokens = draw(function, logits, [row] * 6, [3] * 6, state_of(ROWS, device))
    assert tokens[:5] == [-1, -1, -1, -1, 1234]
    assert 0 <= tokens[5] < 2100


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_no_rows(function, device):
    assert draw(function, torch.zeros(0, 10, device=device), [], [], state_of([], device)) == []


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
def test_reference_draws_follow_the_filtered_softmax(filters, device):
    draws, vocabulary, temperature = 20_000, 11, 0.8
    logits = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)).to(device)
    logits[4] = -math.inf
    seeds = torch.arange(200, device=device) * 7_919 - 3
    state = state_of([{"temperature": temperature} | filters] * 200, device)
    state.seed[:200] = seeds
    rows = torch.arange(draws, device=device) % 200
    positions = (torch.arange(draws, device=device) // 200).int()
    tokens = sample_reference(logits.expand(draws, -1), rows.int(), positions, state, state.top_k.clone())

    threshold = keep_thresholds_reference(logits.unsqueeze(0), state.select(rows[:1]))
    kept = logits.masked_fill(logits < threshold, -math.inf)
    expected = (kept.double() / temperature).softmax(0).cpu() * draws
    counts = tokens.long().bincount(minlength=vocabulary).cpu()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # 11 degrees of freedom at most: 31.3 is passed by chance once in a thousand; the seeds are fixed.
    assert chi_square < 31.3


def test_successive_positions_and_neighbouring_seeds_draw_independently(device):
    state = state_of([{"temperature": 1.0}] * 64, device)
    state.seed[:64] = torch.arange(64, device=device)
    rows = torch.arange(64, device=device).repeat_interleave(400).int()
    positions = torch.arange(400, device=device).repeat(64).int()
    tokens = (
        sample_reference(
            torch.zeros(len(rows), 4, device=device), rows, positions, state, state.top_k.clone()
        )
        .view(64, 400)
        .long()
    )
    for first, second in ((tokens[:, :-1], tokens[:, 1:]), (tokens[:-1], tokens[1:])):
        counts = (first * 4 + second).flatten().bincount(minlength=16)
        expected = counts.sum() / 16
        assert ((counts - expected) ** 2 / expected).sum() < 37.7  # 15 degrees of freedom, one in a thousand
