"""What a step takes from logits of which each rank has some tokens': drawn tokens, and log-probabilities.

Ranks gather a few numbers a row, never the logits. With one rank the backend's functions see all of them.
"""

from __future__ import annotations

from torch import Tensor

from quire.engine.parallel.share import of_vocabulary
from quire.kernels.backend import Backend
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.sampling.part_logprobs import chosen_of_part
from quire.kernels.sampling.state import SamplingState


class VocabularyParts:
    """The vocabulary, as far as this rank has it."""

    def __init__(self, vocab_size: int, backend: Backend, ranks: Ranks | None) -> None:
        self._backend = backend
        self._ranks = ranks
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._first, end = of_vocabulary(vocab_size, rank, size)
        self._count = end - self._first

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, last_tokens: Tensor
    ) -> Tensor:
        """Draw a token for each row of this rank's logits; with several ranks, as if rows had no filters."""
        if self._ranks is None:
            return self._backend.sample(logits, rows, positions, state, last_tokens)
        if len(logits) == 0:
            return last_tokens[:0]
        own = self._backend.best_of_part(logits, rows, positions, state, self._first, self._count)
        return self._backend.best_of_all(self._ranks.all_gather(own), rows, last_tokens)

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Describe tokens [N] and the k best by this rank's logits, as `sampling.logprobs.logprobs` does."""
        if self._ranks is None or len(logits) == 0:
            return self._backend.logprobs(logits, tokens, k)
        chosen = self._ranks.all_gather(chosen_of_part(logits, tokens, self._first, self._count)).amax(0)
        own = self._backend.logprobs_of_part(logits, chosen, k, self._first, self._count)
        return self._backend.logprobs_of_all(self._ranks.all_gather(own), chosen, k)
