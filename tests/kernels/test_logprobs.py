"""Log-probabilities and best tokens, kernel and reference, against fp64."""

from collections.abc import Callable

import pytest
import torch

from quire.kernels.sampling.logprobs import logprobs, logprobs_reference


def random_logits(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (torch.randn(rows, vocabulary) * 4).to(dtype).to(device)


@pytest.mark.parametrize("function", [logprobs, logprobs_reference])
@pytest.mark.parametrize(("vocabulary", "k"), [(50, 4), (50, 50), (4097, 1), (9000, 20), (9000, 40), (8, 0)])
def test_they_are_the_log_softmax_and_its_best(
    function: Callable[..., tuple[torch.Tensor, ...]],
    vocabulary: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(vocabulary + k)
    wider = random_logits(3, vocabulary + 3, dtype, device)
    logits = wider[:, :vocabulary]
    logits[2, :2] = 60.0
    tokens = torch.tensor([5, -1, 1], dtype=torch.int32, device=device)
    chosen, rank, top_tokens, top = function(logits, tokens, k)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), expected[[0, 1, 2], [5, 0, 1]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top.double(), expected.topk(k).values, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.gather(1, top_tokens.long()), logits.topk(k).values)
    assert all(len(set(row)) == k for row in top_tokens.tolist())
    assert rank.tolist() == [
        1 + int((logits[0] > logits[0, 5]).sum()),
        1 + int((logits[1] > logits[1, 0]).sum()),
        1,
    ]
    assert (chosen.dtype, rank.dtype, top_tokens.dtype, top.dtype) == (
        torch.float32,
        torch.int32,
        torch.int32,
        torch.float32,
    )


def test_equal_logits_come_in_the_order_of_their_tokens(device: torch.device) -> None:
    logits = torch.zeros(2, 9000, device=device)
    logits[1, [8999, 4096, 17]] = 2.0
    _, _, top_tokens, _ = logprobs(logits, torch.zeros(2, dtype=torch.int32, device=device), 5)
    assert top_tokens.tolist() == [[0, 1, 2, 3, 4], [17, 4096, 8999, 0, 1]]


def test_what_cannot_be_is_ranked_last(device: torch.device) -> None:
    logits = torch.full((1, 5000), -torch.inf, device=device)
    logits[0, [4999, 3]] = torch.tensor([1.0, 0.0], device=device)
    _, _, top_tokens, top = logprobs(logits, torch.zeros(1, dtype=torch.int32, device=device), 4)
    assert top_tokens.tolist() == [[4999, 3, 0, 1]]
    expected = [*logits[0, [4999, 3]].log_softmax(0).tolist(), -torch.inf, -torch.inf]
    torch.testing.assert_close(top[0].cpu(), torch.tensor(expected))


@pytest.mark.parametrize("function", [logprobs, logprobs_reference])
def test_nan_shows(function: Callable[..., tuple[torch.Tensor, ...]], device: torch.device) -> None:
    logits = torch.zeros(2, 5000, device=device)
    logits[0, 4500] = torch.nan
    chosen, _, _, top = function(logits, torch.zeros(2, dtype=torch.int32, device=device), 3)
    assert chosen.isnan().tolist() == [True, False]
    assert top.isnan().all(1).tolist() == [True, False]
