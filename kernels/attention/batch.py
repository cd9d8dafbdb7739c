"""A step's tokens, and a layer's attention, as models and kernels take them: device tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from quire.kernels.attention.cascade import SharedPrefixes
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.shapes import StepShape


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What attention of one layer is, in every step.

    window: how many newest keys a query sees, 0 means all; chunked: of them only those from the last multiple
    of the window on, as Llama 4's local layers. slopes [Hq] fp32: what a score loses for each token between
    key and query (ALiBi), or None. softcap: what a scaled score stays below, by tanh;
    0 is none. sinks [Hq]: the score of a key without a value that each head sees besides, or None. rope
    [max_pos, D] fp32, cosines then sines, or None for models without; q_norm and k_norm [D], or both None.
    latent: so many of a key's first numbers are its value (see `kernels.attention.latent`); 0: none are.
    Raises ValueError if only one is given, or a chunk has no length.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    rope: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    chunked: bool = False
    latent: int = 0

    def __post_init__(self) -> None:
        if self.chunked and not self.window:
            raise ValueError("chunked attention needs a window, the length of a chunk")
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm and k_norm must be given together, got only one")

    @property
    def group(self) -> int:
        """Return how many query heads a kv head serves."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Return how many numbers a value has, and what a query head attends to."""
        return self.latent or self.head_dim

    @property
    def plain(self) -> bool:
        """Return whether weights are the softmax of the scaled scores of all keys or of the newest."""
        return not self.softcap and self.sinks is None and self.slopes is None and not self.chunked

    def queries(self, qkv: Tensor) -> Tensor:
        """View the query heads [T, Hq, D] of a fused projection qkv [T, (Hq + 2 Hkv) D]."""
        return qkv[:, : self.num_heads * self.head_dim].unflatten(1, (self.num_heads, self.head_dim))


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """B rows that attend with one query each, at position context_lens − 1.

    `order` is a permutation of 0 … B − 1, best by falling context length: a long row that starts last keeps
    the device waiting, and of many rows only the first three eighths may be divided for being long. All are
    read before kernels ahead have ended: they must be complete when the kernel just ahead begins.
    """

    block_tables: Tensor  # [*, max_blocks] i32
    rows: Tensor  # [B] i32, each one's table
    context_lens: Tensor  # [B] i32, this step's token counted; 0 pads
    order: Tensor  # [B] i32
    workspace: DecodeWorkspace | DecodeGather  # what is kept between layers
    shared: SharedPrefixes | None = None


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """P rows that attend with any number of queries, their newest tokens.

    Row p's queries are tokens query_starts[p] to query_starts[p + 1] of the step.
    """

    block_tables: Tensor  # [*, max_blocks] i32
    rows: Tensor  # [P] i32
    query_starts: Tensor  # [P + 1] i32, rising, from the number of decode tokens to that of all tokens
    context_lens: Tensor  # [P] i32, cached tokens after this step; 0 pads
    max_query_len: int
    spans: tuple[Span, ...] = ()  # the P rows, if the host knows them


class Span(NamedTuple):
    """A row of a step as the host knows it: how many tokens it has in the step, and in all; 0 pads."""

    row: int
    tokens: int
    context_len: int


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest tokens of a step's R rows, each one query, a decode's or the last of a prefill chunk."""

    tokens: Tensor  # [R] i32, index in 0 ... T - 1
    queries: DecodeBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens: first the B decode tokens, one to a row, then the prefill tokens."""

    tokens: Tensor  # [T] i32
    positions: Tensor  # [T] i32
    slots: Tensor  # [T] i64, where K and V go: block * block_size + offset; -1 writes nothing
    decode: DecodeBatch
    prefill: PrefillBatch | None = None
    newest: Newest | None = None  # whose hidden states alone are wanted; None: all tokens' are
    # The step as the layers of each cache group after the first take it: with slots and tables of its own.
    other_groups: tuple[ForwardBatch, ...] = ()
    group_of_layer: tuple[int, ...] = ()  # with other groups: which each layer is of
    # Where a row may have more tokens than an indexer chooses, [T] i32: the row of each token.
    token_rows: Tensor | None = None
    # All rows then, in the order of their tokens; none in a step that is recorded for any.
    spans: tuple[Span, ...] = ()

    def by_layer(self, layers: int) -> list[ForwardBatch]:
        """Return what each layer takes."""
        if not self.other_groups:
            return [self] * layers
        groups = (self, *self.other_groups)
        return [groups[group] for group in self.group_of_layer]

    def shape(self, block_size: int, *, last: bool = False) -> StepShape:
        """Return the sizes of the step as a layer sees it; only the `last` one has `newest`."""
        decode, prefill = self.decode, self.prefill
        return StepShape(
            tokens=len(self.tokens),
            decodes=len(decode.rows),
            chunks=None if prefill is None else len(prefill.rows),
            longest_query=0 if prefill is None else prefill.max_query_len,
            newest=len(self.newest.tokens) if last and self.newest is not None else None,
            shared=decode.shared is not None,
            block_size=block_size,
            longest_context=decode.block_tables.shape[1] * block_size,
        )

    def newest_by_layer(self, layers: int) -> list[Newest | None]:
        """Return whose hidden states each layer owes to what follows it: to another layer all tokens'."""
        return [None] * (layers - 1) + [self.newest]


def of_newest(x: Tensor, newest: Newest | None) -> Tensor:
    """Select x [T, ...] -> [R, ...], a copy; or x itself where all tokens are wanted."""
    return x if newest is None else x.index_select(0, newest.tokens)
