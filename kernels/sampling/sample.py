"""Choosing tokens from logits: greedy, or Gumbel-max with Philox noise after min-p, top-k and top-p.

All filters are one threshold on the raw logits, since temperature keeps their order. The noise depends on
(seed, index, position, token) alone, so a token does not depend on the batch around it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.launch import dependent_launch
from quire.kernels.sampling.philox import log_exponential, log_exponential_reference, philox_reference
from quire.kernels.sampling.state import SamplingState
from quire.kernels.sampling.thresholds import keep_thresholds, keep_thresholds_reference

CHUNK = 2048  # tokens of a row that one program of the argmax looks at


def sample(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, last_tokens: Tensor
) -> Tensor:
    """Return one token for each row of logits [S, V], by the state of device row rows[s]: [S] int32.

    positions [S] is where the token goes in its sequence. Among equals the lowest id wins. -inf is never
    chosen; a row with NaN, with +inf or with nothing finite gives -1. last_tokens [*] int32, by device row,
    has the token then, too, or 0 for -1. Rows and the state are read before kernels ahead have ended: they
    must be complete when the kernel just ahead begins.
    """
    samples, vocabulary = logits.shape
    tokens = torch.empty(samples, dtype=torch.int32, device=logits.device)
    if samples == 0:
        return tokens
    thresholds = keep_thresholds(logits, rows, state)
    chunks = triton.cdiv(vocabulary, CHUNK)
    best = torch.empty(samples, chunks, dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty(samples, chunks, dtype=torch.int32, device=logits.device)
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
        vocabulary,
        CHUNK,
        ON_GPU=logits.is_cuda,
        FIRST=0,
        **dependent_launch(logits.device),
    )
    argmax_kernel[(samples,)](
        best, best_tokens, rows, tokens, last_tokens, chunks, triton.next_power_of_2(chunks),
        **dependent_launch(logits.device),
    )  # fmt: skip
    return tokens


def sample_reference(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, last_tokens: Tensor
) -> Tensor:
    """Do the same as `sample` in plain torch."""
    best, tokens = logits.max(dim=-1)
    valid = best.isfinite()
    picked = (state.temperature[rows.long()] > 0).nonzero().squeeze(1)
    if len(picked):
        tokens[picked] = _draw(logits[picked].float(), positions[picked], state.select(rows[picked]))
    tokens = torch.where(valid, tokens, -1).int()
    last_tokens[rows] = tokens.clamp(min=0)
    return tokens


def _draw(logits: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    """Draw among the kept tokens (Gumbel-max): argmax of logit - temperature * log(exponential)."""
    kept = logits >= keep_thresholds_reference(logits, state).unsqueeze(1)
    return noisy_scores(logits, kept, positions, state).argmax(dim=-1)


def noisy_scores(
    logits: Tensor, kept: Tensor, positions: Tensor, state: SamplingState, first: int = 0
) -> Tensor:
    """Return logit - temperature * log(exponential) of the kept logits [S, V], and -inf for the others.

    first: the token that column 0 is of, a multiple of 4.
    """
    vocabulary = logits.shape[1]
    quads = -(-vocabulary // 4)  # one Philox call gives the noise of four neighbouring tokens
    scores = logits.new_full((len(logits), quads * 4), -torch.inf)
    scores[:, :vocabulary] = logits.masked_fill(~kept, -torch.inf)
    scores = scores.view(-1, 4)
    for quad in scores.isfinite().any(1).nonzero().squeeze(1).split(1 << 18):
        row = quad // quads
        counter = (
            first // 4 + quad % quads,
            positions[row].long(),
            state.index[row].long(),
            torch.zeros_like(row),
        )
        noise = log_exponential_reference(philox_reference(state.seed[row], counter))
        scores[quad] -= state.temperature[row].unsqueeze(1) * noise
    return scores.view(len(logits), -1)[:, :vocabulary]


# Before kernels ahead have ended, see `kernels.launch`.
READS_EARLY = frozenset(("rows_ptr", "temperature_ptr"))


@triton.jit
def chunk_argmax_kernel(
    logits_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    index_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_tokens_ptr: tl.tensor,
    stride: tl.tensor,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    ON_GPU: tl.constexpr,
    FIRST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Find the best token of a chunk of VOCABULARY logits, the first of which is that of token FIRST."""
    sample = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + sample)
    temperature = tl.load(temperature_ptr + row)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    logits = tl.load(logits_ptr + sample * stride + token, inside, other=float("-inf")).to(tl.float32)
    scores = logits
    if temperature > 0:
        kept = logits >= tl.load(thresholds_ptr + sample)
        scores = tl.where(kept, logits, float("-inf"))
    if (temperature > 0) & (tl.max(scores) > float("-inf")):
        quad = FIRST // 4 + chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        position = tl.load(positions_ptr + sample) + tl.zeros_like(quad)
        index = tl.load(index_ptr + row) + tl.zeros_like(quad)
        a, b, c, d = tl.philox(tl.load(seed_ptr + row), quad, position, index, tl.zeros_like(quad))
        words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        scores -= temperature * log_exponential(words, ON_GPU)
    # A NaN fails the comparison, so what cannot be sampled from shows as an infinite score.
    scores = tl.where(logits < float("inf"), scores, float("inf"))
    best = tl.max(scores)
    slot = sample * tl.num_programs(1) + chunk
    tl.store(best_ptr + slot, best)
    tl.store(best_tokens_ptr + slot, FIRST + tl.min(tl.where(scores == best, token, VOCABULARY)))


@triton.jit
def argmax_kernel(
    best_ptr: tl.tensor,
    best_tokens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sample)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.arange(0, CHUNKS_PADDED)
    inside = chunk < CHUNKS
    scores = tl.load(best_ptr + sample * CHUNKS + chunk, inside, other=float("-inf"))
    best = tl.max(scores)
    candidates = tl.load(
        best_tokens_ptr + sample * CHUNKS + chunk, inside & (scores == best), other=2147483647
    )
    token = tl.where(tl.abs(best) < float("inf"), tl.min(candidates), -1)
    tl.store(tokens_ptr + sample, token)
    tl.store(last_tokens_ptr + row, tl.maximum(token, 0))
