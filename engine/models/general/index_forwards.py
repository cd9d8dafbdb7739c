"""What modules of transformers compute of which an indexer chooses the tokens, or their blocks.

`general.own_attention` says of which classes these are methods.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.engine.models.general.attention import EVERY
from quire.engine.models.general.forwards import refuse, theirs
from quire.engine.models.general.index_parts import IndexParts, Kind
from quire.engine.models.general.indexer import Indexer, Keys, tokens_of_blocks
from quire.engine.models.general.unsupported import UnsupportedAttention


def indexed(self: Any, *others: Any, attention_mask: Tensor | None = None, **given: Any) -> Any:
    refuse(attention_mask=attention_mask)
    return theirs(self, *others, attention_mask=EVERY, **given)


def index(
    self: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: object,
    **given: object,
) -> Any:
    """Return what the layer's attention has the module's own code choose."""

    def run(tokens: slice, rows: int, seen: Tensor, keys: Keys) -> Any:
        def part(each: Tensor) -> Tensor:
            return each[0, tokens].unflatten(0, (rows, -1))

        angles = tuple(map(part, position_embeddings))
        return theirs(self, part(hidden_states), part(q_resid), angles, seen, None, past_key_values=keys)

    kind: Kind | None = getattr(self, "quire_kind", None)
    parts = None
    if kind is not None:
        cos, sin = position_embeddings
        parts = IndexParts(kind, self, hidden_states[0], q_resid[0], cos[0], sin[0])
    indexer = Indexer(run, self.n_heads, self.head_dim, self.index_topk, parts)
    return self.quire.choose(self.layer_idx, indexer)


def index_by_hidden(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: object,
    position_ids: Tensor,
    **given: object,
) -> Any:
    """Do as `index` does, of a module whose queries come from hidden states, scaled by position."""

    def run(tokens: slice, rows: int, seen: Tensor, keys: Keys) -> Any:
        def part(each: Tensor) -> Tensor:
            return each[0, tokens].unflatten(0, (rows, -1))

        angles = tuple(map(part, position_embeddings))
        return theirs(self, part(hidden_states), angles, seen, part(position_ids), past_key_values=keys)

    return self.quire.choose(self.layer_idx, Indexer(run, self.n_heads, self.head_dim, self.index_topk))


def index_blocks(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    past_key_values: object,
    position_ids: Tensor,
) -> Any:
    """Return what the layer's attention has the module's own code choose: blocks of tokens, by KV head."""
    if self.num_heads != self.config.num_key_value_heads:
        raise UnsupportedAttention(
            f"its indexers have {self.num_heads} heads for {self.config.num_key_value_heads} KV heads"
        )

    def run(tokens: slice, rows: int, seen: Tensor, keys: Keys) -> Tensor:
        def part(each: Tensor) -> Tensor:
            return each[0, tokens].unflatten(0, (rows, -1))

        # Of keys that are only kept there is one, whatever the positions are.
        positions = part(position_ids).clamp(max=seen.shape[-1] - 1)
        angles = tuple(map(part, position_embeddings))
        blocks = theirs(self, part(hidden_states), angles, _BlockKeys(keys), positions)
        return tokens_of_blocks(blocks.transpose(1, 2), positions, self.block_size)

    indexer = Indexer(run, self.num_heads, self.head_dim, self.topk_blocks * self.block_size, by_head=True)
    return self.quire.choose(self.layer_idx, indexer)


class _BlockKeys:
    """Stands for a cache of transformers', and for all of its layers."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    @property
    def layers(self) -> _BlockKeys:
        return self

    def __getitem__(self, layer: int) -> _BlockKeys:
        return self

    def update_index(self, keys: Tensor) -> Tensor:
        """Take a call's keys [B, 1, n, D], and return those that may be chosen [B, 1, L, D]."""
        return self._keys.update_indexer(keys[:, 0], 0)[:, None]
