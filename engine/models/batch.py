"""One step's tokens as a model sees them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.attention.cascade import SharedPrefixes
from quire.kernels.attention.decode_reference import DecodeGather
from quire.kernels.attention.splits import DecodeWorkspace


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The P sequences of a step that compute more than a decode's one token; device tensors."""

    rows: Tensor  # [P] i32
    query_starts: Tensor  # [P + 1] i32, from the number of decode tokens to that of all tokens
    context_lens: Tensor  # [P] i32, cached tokens after this step
    max_query_len: int


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest tokens of a step's R sequences; device tensors.

    Each is one query, at position context_lens − 1, whether a decode's or the last of a prefill chunk.
    """

    tokens: Tensor  # [R] i32, index in 0 ... T - 1
    rows: Tensor  # [R] i32
    context_lens: Tensor  # [R] i32, cached tokens after this step; 0 pads
    order: Tensor  # [R] i32, 0 ... R - 1 by falling context length


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens as device tensors: first the B decode tokens, one to a sequence, then the prefill tokens."""

    tokens: Tensor  # [T] i32
    positions: Tensor  # [T] i32
    slots: Tensor  # [T] i64, where K and V go: block * block_size + offset; -1 writes nothing
    block_tables: Tensor  # [rows, max_blocks_per_sequence] i32
    decode_rows: Tensor  # [B] i32
    decode_context_lens: Tensor  # [B] i32, this step's token counted; 0 pads
    decode_order: Tensor  # [B] i32, 0 ... B - 1 by falling context length
    prefill: PrefillBatch | None
    workspace: DecodeWorkspace | DecodeGather | None = None  # what the decode kernel keeps between layers
    shared: SharedPrefixes | None = None  # by decodes
    newest: Newest | None = None  # whose hidden states alone are wanted; None: all tokens' are

    def newest_by_layer(self, layers: int) -> list[Newest | None]:
        """Whose hidden states each layer owes to what follows it: to another layer all tokens'."""
        return [None] * (layers - 1) + [self.newest]


def of_newest(x: Tensor, newest: Newest | None) -> Tensor:
    """x [T, ...] -> [R, ...], a copy; or x itself where all tokens are wanted."""
    return x if newest is None else x.index_select(0, newest.tokens)
