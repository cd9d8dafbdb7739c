"""Which experts a token goes to, and what they weigh, as routers of many models have it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import HAS_GPU, with_dtypes
from torch import Tensor

from quire.kernels.experts.routing import (
    Divisor,
    Routing,
    chosen_by,
    route,
    route_reference,
    scores_of,
    weights_of,
)

KINDS = {
    "mixtral": (8, Routing(2, divisor=Divisor()), False),
    "olmoe": (60, Routing(4), False),
    "deepseek v2 lite": (64, Routing(6, scale=1.5), False),
    "deepseek v2": (160, Routing(6, scale=16.0, groups=8, kept=3), False),
    "mistral 4": (24, Routing(3, divisor=Divisor(1e-20), groups=4, kept=2, group_by="two"), False),
    "deepseek v3": (
        256, Routing(8, "sigmoid", Divisor(1e-20), 2.5, groups=8, kept=4, group_by="two"), True
    ),
    "glm 4.5": (128, Routing(8, "sigmoid", Divisor(1e-20)), True),
    "ernie 4.5": (64, Routing(6, divisor=Divisor(least=1e-12)), True),
    "lfm 2": (32, Routing(4, "sigmoid", Divisor(1e-6)), False),
    "llama 4": (5, Routing(1, "sigmoid"), False),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "dtype"), with_dtypes((kind,) for kind in KINDS))
def test_the_largest_are_chosen(kind, device, dtype):
    torch.manual_seed(0)
    experts, routing, biased = KINDS[kind]
    logits = torch.stack([torch.randperm(experts) * 12 / experts - 6 for _ in range(6)]).to(device, dtype)
    logits[5] -= 50.0  # scores that nearly vanish
    bias = torch.randperm(experts).to(device) / experts if biased else None
    weights, index = route(logits, routing, bias, torch.float32)
    expected, chosen = route_reference(logits, routing, bias, torch.float32)
    if dtype == torch.float32:  # in 16 bits there are equals, of which torch takes any
        assert torch.equal(index, chosen)
        torch.testing.assert_close(weights, expected, atol=0.0, rtol=1e-5)
    scores = scores_of(logits, routing).gather(1, index)
    torch.testing.assert_close(weights, weights_of(scores, routing), atol=0.0, rtol=1e-5)
    rounded, _ = route(logits, routing, bias, dtype)
    torch.testing.assert_close(rounded, weights.to(dtype))


@st.composite
def routings(draw):
    groups, size = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    kept = draw(st.integers(1, groups))
    return groups * size, Routing(
        top=draw(st.integers(1, kept * size)),
        scores=draw(st.sampled_from(("softmax", "sigmoid"))),
        divisor=draw(st.sampled_from((None, Divisor(), Divisor(1e-6), Divisor(least=0.5)))),
        scale=draw(st.sampled_from((1.0, 2.5))),
        groups=groups,
        kept=kept,
        group_by=draw(st.sampled_from(("best", "two"))),
    )


@settings(max_examples=40, deadline=None)
@given(routings(), st.booleans(), st.randoms(use_true_random=False))
def test_of_equals_the_first_is_chosen(kind, biased, random):
    """Experts, and groups of them: the logits are of few kinds."""
    experts, routing = kind
    device = "cuda" if HAS_GPU else "cpu"
    logits = torch.tensor([[random.randrange(4) for _ in range(experts)] for _ in range(3)]).float()
    bias = torch.tensor([random.randrange(3) / 4 for _ in range(experts)])
    if not biased or routing.group_by == "two":  # sums that are the same may be rounded otherwise
        bias = None
    weights, index = route(
        logits.to(device), routing, None if bias is None else bias.to(device), torch.float32
    )
    scores = scores_of(logits, routing)
    expected = first_of_equals(scores if bias is None else scores + bias, routing)
    assert index.tolist() == expected
    chosen = scores.gather(1, torch.tensor(expected))
    torch.testing.assert_close(weights.cpu(), weights_of(chosen, routing), atol=0.0, rtol=1e-5)


def first_of_equals(scores: Tensor, routing: Routing) -> list[list[int]]:
    """Choose as slowly as can be."""
    result = []
    for row in scores.tolist():
        size = len(row) // routing.groups
        groups = [range(size * group, size * (group + 1)) for group in range(routing.groups)]

        def of_group(group: range, row: list[float] = row) -> float:
            first, second = sorted((row[each] for each in group), reverse=True)[:2]
            return first + second if routing.group_by == "two" else first

        kept = sorted(groups, key=lambda group: -of_group(group))[: routing.kept]
        members = sorted(each for group in kept for each in group)
        result.append(sorted(members, key=lambda each: -row[each])[: routing.top])
    return result


def test_an_expert_that_is_not_there_is_never_chosen(device):
    for experts, routing, _ in KINDS.values():
        logits = torch.full((2, experts), math.nan, device=device)
        logits[1] = -math.inf
        _, index = route(logits, routing, None, torch.float32)
        assert (index >= 0).all() and (index < experts).all()


def test_zeros_of_both_signs_are_equals_and_what_is_no_number_comes_last(device):
    logits = torch.tensor(
        [[-1.0, -0.0, 0.0, math.nan, -2.0, -0.0], [math.nan, 1e-40, -math.inf, 0.5, math.inf, -1e-40]],
        device=device,
    )
    for scores in ("softmax", "sigmoid"):
        _, index = route(logits, Routing(4, scores), None, torch.float32)
        assert index[0].tolist() == [1, 2, 5, 0]
        if scores == "softmax":
            assert index[1].tolist() == [4, 3, 1, 5]


def test_no_token_goes_nowhere(device):
    weights, index = route(torch.zeros(0, 8, device=device), Routing(2), None, torch.float32)
    assert weights.shape == index.shape == (0, 2)


def test_groups_that_are_not_kept_give_none(device):
    """Experts of a group with the best alone lose against a group with the best two."""
    logits = torch.tensor([[5.0, -5.0, 2.0, 2.0, 0.0, 0.0]], device=device)
    two = Routing(2, "sigmoid", groups=3, kept=1, group_by="two")
    best = Routing(2, "sigmoid", groups=3, kept=1)
    for routing, expected in ((two, [[2, 3]]), (best, [[0, 1]])):
        assert route(logits, routing, None, torch.float32)[1].tolist() == expected
        assert chosen_by(scores_of(logits, routing), routing, None).sort(-1).values.tolist() == expected
