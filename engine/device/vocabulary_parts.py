"""What a step takes from logits of which each rank has some tokens': drawn tokens, and log-probabilities.

Ranks gather a few numbers a row, never the logits. With one rank the backend's functions see all of them.
Ranks that write into each other's memory draw by `kernels.sampling.peer_sampling`, filters included; others
gather round by round, and rows with filters are drawn again by what the host knows of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.parallel.share import of_vocabulary
from quire.kernels.backend import Backend
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.sampling.part_logprobs import chosen_of_part
from quire.kernels.sampling.part_thresholds import Search, peaks_of_part, search_count, search_share
from quire.kernels.sampling.peer_sampling import draw
from quire.kernels.sampling.state import SamplingState


class Searched(NamedTuple):
    """The filters that some row has and whose thresholds ranks search for together."""

    top_k: bool
    top_p: bool


class VocabularyParts:
    """The vocabulary, as far as this rank has it: `count` tokens from `first` on."""

    def __init__(self, vocab_size: int, backend: Backend, ranks: Ranks | None) -> None:
        self._backend = backend
        self._ranks = ranks
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self.first, end = of_vocabulary(vocab_size, rank, size)
        self.count = end - self.first

    @property
    def leaves_filters_out(self) -> bool:
        """Return whether `sample` draws as if rows had none."""
        return self._ranks is not None and self._ranks.buffers is None

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, last_tokens: Tensor
    ) -> Tensor:
        """Draw a token for each row of this rank's logits, among those kept unless `leaves_filters_out`."""
        if self._ranks is None:
            return self._backend.sample(logits, rows, positions, state, last_tokens)
        if len(logits) == 0:
            return last_tokens[:0]
        if self._ranks.buffers is not None:
            place, buffers = (self.first, self.count), self._ranks.buffers
            return draw(logits, rows, positions, state, last_tokens, *place, buffers)
        own = self._backend.best_of_part(logits, rows, positions, state, self.first, self.count)
        return self._backend.best_of_all(self._ranks.all_gather(own), rows, last_tokens)

    def sample_filtered(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: SamplingState,
        last_tokens: Tensor,
        searched: Searched,
    ) -> Tensor:
        """Draw a token for each row of this rank's logits among those that top-k, top-p and min-p keep.

        searched: as the host knows it of the rows' parameters.
        """
        if self._ranks is None or not self.leaves_filters_out:
            return self.sample(logits, rows, positions, state, last_tokens)
        thresholds = self._thresholds(logits, state.select(rows), searched)
        own = self._backend.best_of_part(logits, rows, positions, state, self.first, self.count, thresholds)
        return self._backend.best_of_all(self._ranks.all_gather(own), rows, last_tokens)

    def _thresholds(self, logits: Tensor, state: SamplingState, searched: Searched) -> Tensor:
        """Return the lowest logit that each row keeps, as `keep_thresholds` does; state's rows match."""
        assert self._ranks is not None
        highest = self._ranks.all_gather(peaks_of_part(logits, self.count)).amax(0)
        limit = highest + state.temperature * state.min_p.log()
        limit = torch.where(state.min_p > 0, limit, -torch.inf)
        if searched.top_k:
            kth = self._found(logits, search_count(logits.dtype, state.top_k, highest))
            limit = torch.maximum(limit, kth)
        if searched.top_p:
            share = state.top_p.masked_fill(state.top_p >= 1, 0)
            search = search_share(logits.dtype, share, limit, highest, state.temperature)
            limit = torch.maximum(limit, self._found(logits, search))
        return limit

    def _found(self, logits: Tensor, search: Search) -> Tensor:
        """Return the values that a search ends with."""
        assert self._ranks is not None
        found = search.highest
        for step in search.steps:
            own = self._backend.masses_of_part(logits, self.count, search, step)
            found = self._backend.narrow(self._ranks.all_gather(own), search, step)
        return found

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Describe tokens [N] and the k best by this rank's logits, as `sampling.logprobs.logprobs` does."""
        if self._ranks is None or len(logits) == 0:
            return self._backend.logprobs(logits, tokens, k)
        chosen = self._ranks.all_gather(chosen_of_part(logits, tokens, self.first, self.count)).amax(0)
        own = self._backend.logprobs_of_part(logits, chosen, k, self.first, self.count)
        return self._backend.logprobs_of_all(self._ranks.all_gather(own), chosen, k)
