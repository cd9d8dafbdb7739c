"""Log-probabilities of chosen tokens and the best tokens of each row, in one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # tokens of a row that one program looks at
LEAST = tl.constexpr(-3.0e38)  # stands for -inf while candidates are ranked, so that -inf means "none"


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities of tokens [N] under logits [N, V], and the k best of each row.

    -> (chosen [N] fp32, rank [N] int32, top_tokens [N, k] int32, top_logprobs [N, k] fp32). The rank is
    1 + the number of strictly larger logits; among equals the lowest token is best. An invalid token (-1)
    is described as token 0.
    """
    count, vocabulary = logits.shape
    device = logits.device
    chunks = triton.cdiv(vocabulary, CHUNK)
    width = candidates_width(k)
    parts = torch.empty(3, count, chunks, dtype=torch.float32, device=device)
    best = torch.empty(count, chunks, k, dtype=torch.float32, device=device)
    best_tokens = torch.empty(count, chunks, k, dtype=torch.int32, device=device)
    chosen = torch.empty(count, dtype=torch.float32, device=device)
    rank = torch.empty(count, dtype=torch.int32, device=device)
    top = torch.empty(count, k, dtype=torch.float32, device=device)
    top_tokens = torch.empty(count, k, dtype=torch.int32, device=device)
    if count:
        chunk_kernel[(count, chunks)](
            logits, tokens, None, *parts, best, best_tokens, logits.stride(0), k, 0, vocabulary, CHUNK,
            num_warps=8,
        )  # fmt: skip
        merge_kernel[(count,)](
            logits, tokens, None, *parts, best, best_tokens, chosen, rank, top, top_tokens,
            logits.stride(0), k, chunks, triton.next_power_of_2(chunks), width, num_warps=8,
        )  # fmt: skip
    return chosen, rank, top_tokens, top


def candidates_width(k: int) -> int:
    """Return how many candidates the kernel that merges chunks has room for: few variants to compile."""
    return 32 if k <= 32 else triton.next_power_of_2(k)


def logprobs_reference(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do the same as `logprobs` in plain torch; equal logits come in any order."""
    wide = logits.float()
    total = wide.logsumexp(dim=1, keepdim=True)
    chosen = wide.gather(1, tokens.long().clamp(min=0).unsqueeze(1))
    rank = 1 + (wide > chosen).sum(dim=1)
    best, best_tokens = wide.topk(k, dim=1)
    return (chosen - total).squeeze(1), rank.int(), best_tokens.int(), best - total


@triton.jit(do_not_specialize=["k", "first"])
def chunk_kernel(
    logits_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    known_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    greater_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_tokens_ptr: tl.tensor,
    stride: tl.tensor,
    k: tl.tensor,
    first: tl.tensor,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Find a chunk's greatest logit, sum of exponentials, how many exceed the chosen token's, the k best.

    The first of VOCABULARY logits is that of token `first`. known: the chosen tokens' logits [N] fp32, where
    they need not be among these.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    logits = tl.load(logits_ptr + row * stride + token, inside, other=float("-inf")).to(tl.float32)
    if known_ptr is not None:
        chosen = tl.load(known_ptr + row)
    else:
        chosen = tl.load(logits_ptr + row * stride + tl.maximum(tl.load(tokens_ptr + row), 0)).to(tl.float32)
    peak = tl.maximum(tl.max(logits), LEAST)
    slot = row * tl.num_programs(1) + chunk
    tl.store(peaks_ptr + slot, peak)
    tl.store(totals_ptr + slot, tl.sum(tl.exp(logits - peak)))
    tl.store(greater_ptr + slot, tl.sum((logits > chosen).to(tl.float32)))
    scores = tl.where(inside, tl.maximum(logits, LEAST), float("-inf"))
    for i in range(k):
        best = tl.max(scores)
        best_token = tl.min(tl.where(inside & (scores == best), token, VOCABULARY - 1))
        tl.store(best_ptr + slot * k + i, best)
        tl.store(best_tokens_ptr + slot * k + i, first + best_token)
        scores = tl.where(token == best_token, float("-inf"), scores)


@triton.jit(do_not_specialize=["k"])
def merge_kernel(
    logits_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    known_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    greater_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_tokens_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    top_ptr: tl.tensor,
    top_tokens_ptr: tl.tensor,
    stride: tl.tensor,
    k: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PADDED)
    here = chunk < CHUNKS
    slot = row * CHUNKS + chunk
    peaks = tl.load(peaks_ptr + slot, here, other=LEAST)
    peak = tl.max(peaks)
    total = peak + tl.log(tl.sum(tl.load(totals_ptr + slot, here, other=0.0) * tl.exp(peaks - peak)))
    greater = tl.sum(tl.load(greater_ptr + slot, here, other=0.0))
    if known_ptr is not None:
        chosen = tl.load(known_ptr + row)
    else:
        chosen = tl.load(logits_ptr + row * stride + tl.maximum(tl.load(tokens_ptr + row), 0)).to(tl.float32)
    tl.store(chosen_ptr + row, chosen - total)
    tl.store(rank_ptr + row, 1 + greater.to(tl.int32))

    candidate = tl.arange(0, WIDTH)
    mask = here[:, None] & (candidate < k)[None, :]
    entry = (slot * k)[:, None] + candidate[None, :]
    scores = tl.load(best_ptr + entry, mask, other=float("-inf"))
    tokens = tl.load(best_tokens_ptr + entry, mask, other=0)
    for i in range(k):
        best = tl.max(tl.max(scores, 1), 0)
        found = mask & (scores == best)  # nothing where a logit is NaN
        best_token = tl.min(tl.min(tl.where(found, tokens, 2147483647), 1), 0)
        best_token = tl.where(best_token == 2147483647, 0, best_token)
        tl.store(top_ptr + row * k + i, tl.where(best > LEAST, best, float("-inf")) - total)
        tl.store(top_tokens_ptr + row * k + i, best_token)
        scores = tl.where(tokens == best_token, float("-inf"), scores)
