"""Log-probabilities over parts of the vocabulary, a rank each: what each part knows, then what all know.

A rank's part is a few numbers a row, so no rank needs another's logits.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.kernels.sampling.logprobs import CHUNK, candidates_width, chunk_kernel, merge_kernel
from quire.kernels.sampling.parts import NO_TOKEN

Logprobs = tuple[Tensor, Tensor, Tensor, Tensor]  # as `logprobs` gives them
SUMS = 3  # numbers of a chunk beside its candidates: greatest logit, sum of exponentials, larger ones


def chosen_of_part(logits: Tensor, tokens: Tensor, first: int, count: int) -> Tensor:
    """Return the logits of tokens [N], where columns [0, count) of logits [N, W] have them: [N] fp32.

    They are -inf elsewhere. first: the token of column 0. Token -1 stands for token 0, as in `logprobs`.
    """
    column = tokens.long().clamp(min=0) - first
    is_here = (column >= 0) & (column < count)
    found = logits.gather(1, column.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(is_here, found.float(), -torch.inf)


def logprobs_of_part(logits: Tensor, chosen: Tensor, k: int, first: int, count: int) -> Tensor:
    """Return what columns [0, count) of logits [N, W] know: [N, C, 3 + 2 k] i32, C chunks to a row.

    chosen [N] fp32: the chosen tokens' logits, whichever part they are in. A chunk's numbers are its greatest
    logit, its sum of exponentials and how many exceed the chosen one, as fp32 bits, then the k best logits,
    and their tokens.
    """
    rows, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    sums = torch.empty(SUMS, rows, chunks, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, chunks, k, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, chunks, k, dtype=torch.int32, device=logits.device)
    if rows:
        chunk_kernel[(rows, chunks)](
            logits, None, chosen, *sums, best, tokens, logits.stride(0), k, first, count, CHUNK, num_warps=8
        )
    return torch.cat((sums.permute(1, 2, 0).view(torch.int32), best.view(torch.int32), tokens), 2)


def logprobs_of_all(gathered: Tensor, chosen: Tensor, k: int) -> Logprobs:
    """Return what `logprobs` does, by every rank's `logprobs_of_part`, gathered [R, N, C, 3 + 2 k]."""
    sums, best, best_tokens = _by_row(gathered, k)
    _, rows, chunks = sums.shape
    device = gathered.device
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    rank = torch.empty(rows, dtype=torch.int32, device=device)
    top = torch.empty(rows, k, dtype=torch.float32, device=device)
    top_tokens = torch.empty(rows, k, dtype=torch.int32, device=device)
    if rows:
        merge_kernel[(rows,)](
            None, None, chosen, *sums, best, best_tokens, logprob, rank, top, top_tokens,
            0, k, chunks, triton.next_power_of_2(chunks), candidates_width(k), num_warps=8,
        )  # fmt: skip
    return logprob, rank, top_tokens, top


def logprobs_of_part_reference(logits: Tensor, chosen: Tensor, k: int, first: int, count: int) -> Tensor:
    """Do the same as `logprobs_of_part` in plain torch, with one chunk to a row; equals come in any order."""
    wide = logits[:, :count].float()
    part = torch.empty(len(logits), 1, SUMS + 2 * k, dtype=torch.int32, device=logits.device)
    sums, best, tokens = part.split((SUMS, k, k), dim=2)
    best.view(torch.float32).fill_(-torch.inf)
    tokens.fill_(NO_TOKEN)
    sums.view(torch.float32).copy_(torch.tensor([-torch.inf, 0.0, 0.0]))
    if count:
        peak = wide.amax(dim=1, keepdim=True)
        total = (wide - peak).exp().sum(dim=1, keepdim=True).nan_to_num()  # of a part of -inf alone: 0
        greater = (wide > chosen.unsqueeze(1)).sum(dim=1, keepdim=True).float()
        sums.view(torch.float32)[:, 0] = torch.cat((peak, total, greater), 1)
        found = wide.topk(min(k, count), dim=1)
        best.view(torch.float32)[:, 0, : min(k, count)] = found.values
        tokens[:, 0, : min(k, count)] = found.indices.int() + first
    return part


def logprobs_of_all_reference(gathered: Tensor, chosen: Tensor, k: int) -> Logprobs:
    """Do the same as `logprobs_of_all` in plain torch."""
    (peaks, totals, greater), best, best_tokens = _by_row(gathered, k)
    total = (peaks + totals.log()).logsumexp(dim=1, keepdim=True)
    candidates, tokens = best.flatten(1), best_tokens.flatten(1)
    found = candidates.topk(k, dim=1)
    rank = 1 + greater.sum(dim=1)
    return chosen - total.squeeze(1), rank.int(), tokens.gather(1, found.indices), found.values - total


def _by_row(gathered: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums [3, N, C], candidates' logits [N, C, k] and their tokens, of all ranks' C chunks."""
    ranks, rows, chunks, numbers = gathered.shape
    by_row = gathered.transpose(0, 1).reshape(rows, ranks * chunks, numbers)
    sums, best, tokens = by_row.split((SUMS, k, k), dim=2)
    floats = sums.permute(2, 0, 1).contiguous().view(torch.float32)
    return floats, best.contiguous().view(torch.float32), tokens.contiguous()
