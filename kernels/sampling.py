"""Choosing tokens from logits: greedy, or Gumbel-max with Philox noise after min-p, top-k and top-p.

All filters are one threshold on the raw logits, since temperature keeps their order. The noise depends on
(seed, index, position, token) alone, so a token does not depend on the batch around it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.philox import log_exponential_reference, philox_reference

MIN_TEMPERATURE = 1e-20  # keeps (logit - max) / temperature free of 0 / 0


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How each device row samples: tensors [rows]. Temperature 0 is greedy; top_k 0 is off."""

    temperature: Tensor  # fp32
    top_p: Tensor  # fp32
    top_k: Tensor  # int32
    min_p: Tensor  # fp32
    seed: Tensor  # int64
    index: Tensor  # int32, the sequence's index within its group

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> SamplingState:
        """All rows greedy."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            temperature=full(0, torch.float32),
            top_p=full(1, torch.float32),
            top_k=full(0, torch.int32),
            min_p=full(0, torch.float32),
            seed=full(0, torch.int64),
            index=full(0, torch.int32),
        )

    def select(self, rows: Tensor) -> SamplingState:
        """The state of `rows` [S], gathered."""
        rows = rows.long()
        return SamplingState(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            index=self.index[rows],
        )


def sample_reference(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    """One token for each row of logits [S, V], by the state of device row rows[s]: [S] int32.

    positions [S] is where the token goes in its sequence. Among equals the lowest id wins. -inf is never
    chosen; a row with NaN, with +inf or with nothing finite gives -1.
    """
    best, tokens = logits.max(dim=-1)
    valid = best.isfinite()
    picked = (state.temperature[rows.long()] > 0).nonzero().squeeze(1)
    if len(picked):
        tokens[picked] = _draw(logits[picked].float(), positions[picked], state.select(rows[picked]))
    return torch.where(valid, tokens, -1).int()


def _draw(logits: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    """Gumbel-max over the kept tokens: argmax of logit - temperature * log(exponential)."""
    kept = logits >= keep_thresholds_reference(logits, state).unsqueeze(1)
    vocabulary = logits.shape[1]
    quads = -(-vocabulary // 4)  # one Philox call gives the noise of four neighbouring tokens
    scores = logits.new_full((len(logits), quads * 4), -torch.inf)
    scores[:, :vocabulary] = logits.masked_fill(~kept, -torch.inf)
    scores = scores.view(-1, 4)
    for quad in scores.isfinite().any(1).nonzero().squeeze(1).split(1 << 18):
        row = quad // quads
        counter = (quad % quads, positions[row].long(), state.index[row].long(), torch.zeros_like(row))
        noise = log_exponential_reference(philox_reference(state.seed[row], counter))
        scores[quad] -= state.temperature[row].unsqueeze(1) * noise
    return scores.view(len(logits), -1).argmax(dim=-1)


def keep_thresholds_reference(logits: Tensor, state: SamplingState) -> Tensor:
    """The lowest logit that each row of logits [S, V] keeps, [S] fp32; state's rows match the logits'.

    min-p keeps p >= min_p * max p; top-k then the k largest; top-p then the fewest of the highest values
    whose renormalised mass reaches top_p. Tokens that tie with the last one kept are kept.
    """
    logits = logits.float()
    highest = logits.amax(dim=1)
    thresholds = highest + state.temperature * state.min_p.log()
    thresholds = torch.where(state.min_p > 0, thresholds, -torch.inf)
    cut = ((state.top_k > 0) | (state.top_p < 1)).nonzero().squeeze(1)
    if not len(cut):
        return thresholds

    ordered = logits[cut].sort(dim=1, descending=True).values
    top_k = state.top_k[cut].long()
    kth = ordered.gather(1, (top_k - 1).clamp(0, ordered.shape[1] - 1).unsqueeze(1)).squeeze(1)
    limit = torch.where(top_k > 0, torch.maximum(thresholds[cut], kth), thresholds[cut]).unsqueeze(1)
    scaled = (ordered - highest[cut].unsqueeze(1)) / state.temperature[cut].clamp(
        min=MIN_TEMPERATURE
    ).unsqueeze(1)
    mass = scaled.double().exp().masked_fill(ordered < limit, 0).cumsum(dim=1)
    top_p = state.top_p[cut].double().unsqueeze(1)
    last = (mass < top_p * mass[:, -1:]).sum(dim=1, keepdim=True)  # first place whose mass reaches top_p
    nucleus = ordered.gather(1, last.clamp(max=ordered.shape[1] - 1))
    thresholds[cut] = torch.where(top_p < 1, torch.maximum(limit, nucleus), limit).squeeze(1)
    return thresholds


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens [N] under logits [N, V], and the k best of each row.

    -> (chosen [N] fp32, rank [N] int32, top_tokens [N, k] int32, top_logprobs [N, k] fp32). The rank is
    1 + the number of strictly larger logits. An invalid token (-1) is described as token 0.
    """
    wide = logits.float()
    total = wide.logsumexp(dim=1, keepdim=True)
    chosen = wide.gather(1, tokens.long().clamp(min=0).unsqueeze(1))
    rank = 1 + (wide > chosen).sum(dim=1)
    best, best_tokens = wide.topk(k, dim=1)
    return (chosen - total).squeeze(1), rank.int(), best_tokens.int(), best - total
