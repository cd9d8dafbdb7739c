"""A model whose forward is transformers' own, with its attention over the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire.engine.models.config import ModelConfig
from quire.engine.models.general.agreement import agreement
from quire.engine.models.general.attention import give
from quire.engine.models.general.dry_run import decoder_name
from quire.engine.models.general.fusion import fuse
from quire.engine.models.general.index_parts import give_kinds
from quire.engine.models.general.kept_linear import KeptLinear
from quire.engine.models.general.modules import HeadModule
from quire.engine.models.general.own_attention import is_block_indexer, is_indexer
from quire.engine.models.general.paged_attention import PagedAttention
from quire.engine.models.general.positions import StepPositions
from quire.engine.models.general.states import StepStates, give_states
from quire.kernels.attention.batch import ForwardBatch, of_newest
from quire.kernels.backend import Backend
from quire.kernels.formats.layer_cache import LayerCache
from quire.kernels.formats.state_cache import StateCache
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.quantised.weight import WeightFormat


class _Output(BaseModelOutputWithPast):
    """A decoder's output of which only the hidden states are there, whatever else is asked for."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands where a causal model has its decoder, and returns what that gave before."""

    hidden: Tensor

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._stood = (decoder,)  # no part of this

    def __getattr__(self, name: str) -> Any:
        """Return a number that stood there (Falcon H1's scale of logits)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_stood"][0], name)
            if isinstance(found, int | float):
                return found
            raise

    @property
    def decoder(self) -> _Given:
        """Return itself: some causal models reach through a wrapper."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=self.hidden[None])


class GeneralModel:
    """A causal model of transformers: its decoder for `forward`, the rest of it for `part_logits`."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        causal: Any,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        ranks: Ranks | None = None,
        splits: frozenset[int] = frozenset(),
        kept: Mapping[str, WeightFormat] = MappingProxyType({}),
    ) -> None:
        """splits: as `Division` has it, of a model that is divided among ranks.

        kept: formats of weights that stay in few bits, by name.
        """
        self.config = config
        self.backend = backend
        self.ranks = ranks
        self.kept = kept
        self._attention = PagedAttention(config, dtype, device, ranks, splits)
        # Whether kernels choose tokens for all of its indexers, and a graph may hold that.
        self.knows_indexers = give_kinds(causal, is_indexer) and not any(
            map(is_block_indexer, causal.modules())
        )
        classifies = config.pooling is not None and config.pooling.labels > 0
        # Of a head for text, `part_logits` knows more than its weight.
        self.head: Tensor | None = _score_weight(causal) if classifies else None
        self.embedding: Tensor = causal.get_input_embeddings().weight
        for part in causal.modules():
            if isinstance(part, KeptLinear):
                part.multiply = backend.linear
        name = decoder_name(causal)
        self._decoder = getattr(causal, name)
        self._positions = StepPositions(self._decoder)
        self.fusion = fuse(causal, self._decoder, config, backend, self._decode, max_model_len, ranks)
        give(causal, self._attention)
        self._states = StepStates(config.group_of_states, backend.recurrences)
        # Whether its code takes prompts apart as the host knows them, so that graphs hold decodes alone.
        hidden = self.embedding.shape[1]
        self.takes_pieces = give_states(
            causal, config.states, self._states, backend, hidden, agreement(ranks, device)
        )
        head = causal.get_output_embeddings()
        if type(head) is nn.Linear and head.bias is None:
            head.forward = HeadModule(head.weight.data, backend)
        self._given = _Given(self._decoder)
        self._no_token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        setattr(causal, name, self._given)
        self._causal = causal

    def forward(
        self,
        batch: ForwardBatch,
        caches: list[LayerCache],
        states: StateCache | None = None,
    ) -> Tensor:
        """Compute the batch's tokens over the layers' caches -> hidden [T, H], final norm applied.

        [R, H] of `batch.newest` where that is given. states: of the layers that keep some.
        """
        if states is not None:
            self._states.begin(batch, states)
        if self.fusion.attends_by_modules:
            self._attention.begin(replace(batch, newest=None), caches)
        if self.fusion.decoder is not None:
            return self.fusion.decoder.run(batch, caches)
        positions = batch.positions.long().clamp(min=0)  # padding has −1, which no table of positions has
        return of_newest(self._decode(batch.tokens.long(), positions), batch.newest)

    def _decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run the decoder's own code on tokens [T] at positions [T] -> [T, H]."""
        output = self._decoder(input_ids=tokens[None], use_cache=False, **self._positions.begin(positions))
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def part_logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden [S, H] -> [S, V / ranks], with whatever the model does to its logits."""
        self._given.hidden = hidden
        logits: Tensor = self._causal(input_ids=self._no_token.expand(1, len(hidden))).logits[0]
        return logits.contiguous()


def _score_weight(classifier: Any) -> Tensor:
    """Return the head [labels, H] of a classifier. Raises ValueError if it has another."""
    score = getattr(classifier, "score", None)
    if not isinstance(score, nn.Linear) or score.bias is not None:
        raise ValueError(f"{type(classifier).__name__} has no score.weight, which is all that a head may be")
    return score.weight
