"""One step's tokens as a model sees them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.decode_reference import DecodeGather
from kernels.decode_splits import DecodeWorkspace
from kernels.shared_prefix import SharedPrefixes


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The P sequences of a step that compute more than a decode's one token; device tensors."""

    rows: Tensor  # [P] i32
    query_starts: Tensor  # [P + 1] i32, from the number of decode tokens to that of all tokens
    context_lens: Tensor  # [P] i32, cached tokens after this step
    max_query_len: int


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
