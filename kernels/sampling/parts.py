"""Choosing tokens from logits of which each rank has some: every rank's best ones, then the best of those.

What filters keep (top-k, top-p, min-p) is given as thresholds, see `part_thresholds`. A token and its noise
are those of `sample`, whatever the number of ranks.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.launch import dependent_launch
from quire.kernels.sampling.sample import CHUNK, argmax_kernel, chunk_argmax_kernel, noisy_scores
from quire.kernels.sampling.state import SamplingState

NO_TOKEN = 2**31 - 1


def best_of_part(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    first: int,
    count: int,
    thresholds: Tensor | None = None,
) -> Tensor:
    """Return the best scores of logits [S, W], and their tokens: [2, S, C] i32, C candidates to a row.

    [0] holds the scores' fp32 bits. first: the token of column 0, a multiple of 4. count: columns that are
    tokens. rows, positions and state: as `sample` takes them. thresholds [S] fp32: the lowest logit that a
    row keeps if it is not greedy; all keep all without.
    """
    if thresholds is None:
        thresholds = torch.full((len(logits),), -torch.inf, device=logits.device)
    best, best_tokens = best_of_chunks(logits, rows, positions, state, first, count, thresholds)
    return torch.stack((best.view(torch.int32), best_tokens))


def best_of_chunks(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    first: int,
    count: int,
    thresholds: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the candidates' scores [S, C] fp32 and tokens [S, C] i32, as `best_of_part` takes its inputs."""
    samples, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    best = torch.empty(samples, chunks, dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty(samples, chunks, dtype=torch.int32, device=logits.device)
    if samples:
        chunk_argmax_kernel[(samples, chunks)](
            logits,
            thresholds,
            rows,
            positions,
            state.temperature,
            state.seed,
            state.index,
            best,
            best_tokens,
            logits.stride(0),
            count,
            CHUNK,
            ON_GPU=logits.is_cuda,
            FIRST=first,
            **dependent_launch(logits.device),
        )
    return best, best_tokens


def best_of_all(gathered: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
    """Return the token of each row [S] i32 by every rank's `best_of_part`, gathered [N, 2, S, C].

    Among equals the lowest id wins, -1 and `last_tokens` are as with `sample`.
    """
    best, best_tokens = _by_row(gathered)
    samples, candidates = best_tokens.shape
    tokens = torch.empty(samples, dtype=torch.int32, device=gathered.device)
    if samples:
        argmax_kernel[(samples,)](
            best, best_tokens, rows, tokens, last_tokens, candidates, triton.next_power_of_2(candidates),
            **dependent_launch(gathered.device),
        )  # fmt: skip
    return tokens


def best_of_part_reference(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    first: int,
    count: int,
    thresholds: Tensor | None = None,
) -> Tensor:
    """Do the same as `best_of_part` in plain torch, with one candidate to a row."""
    both = torch.empty(2, len(logits), 1, dtype=torch.int32, device=logits.device)
    both[0].view(torch.float32).fill_(-torch.inf)
    both[1].fill_(NO_TOKEN)
    if count == 0 or len(logits) == 0:
        return both
    scores = logits[:, :count].to(torch.float32, copy=True)
    invalid = ~(scores < torch.inf).all(dim=1)
    picked = ((state.temperature[rows.long()] > 0) & ~invalid).nonzero().squeeze(1)
    if len(picked):
        kept = torch.ones_like(scores[picked], dtype=torch.bool)
        if thresholds is not None:
            kept = scores[picked] >= thresholds[picked].unsqueeze(1)
        scores[picked] = noisy_scores(
            scores[picked], kept, positions[picked], state.select(rows[picked]), first
        )
    best, tokens = scores.max(dim=1)
    both[0].view(torch.float32)[:, 0] = torch.where(invalid, torch.inf, best)
    both[1][:, 0] = tokens + first
    return both


def best_of_all_reference(gathered: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
    """Do the same as `best_of_all` in plain torch."""
    scores, candidates = _by_row(gathered)
    best = scores.amax(dim=1, keepdim=True)
    tokens = torch.where(scores == best, candidates, NO_TOKEN).amin(dim=1)
    tokens = torch.where(best.squeeze(1).isfinite(), tokens, -1).int()
    last_tokens[rows] = tokens.clamp(min=0)
    return tokens


def _by_row(gathered: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores and tokens of each row, contiguous: [S, N C] both."""
    _, _, samples, _ = gathered.shape
    both = gathered.permute(1, 2, 0, 3).contiguous().view(2, samples, -1)
    return both[0].view(torch.float32), both[1]
