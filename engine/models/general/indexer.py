"""Which tokens are attended to where a small indexer chooses them (DeepSeek V3.2, GLM-5, MiniMax M3 …).

It scores all earlier tokens by keys of its own, which are in the paged cache beside what heads keep: by
kernels where its kind is known, else by its module's own code, which is given those keys as if a cache of
transformers' had them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.engine.models.general.index_parts import IndexParts
from quire.kernels.attention.batch import ForwardBatch, Span
from quire.kernels.attention.chosen import Chosen
from quire.kernels.attention.chosen_by_head import ChosenByHead
from quire.kernels.attention.index.operations import IndexOperations
from quire.kernels.attention.index.scores import IndexQueries
from quire.kernels.formats.layer_cache import LayerCache

MOST_SCORES = 1 << 26  # numbers that are computed at once, of keys and of scores
NONE = -1  # where no block, or no token, is chosen

Keep = Callable[[Tensor, Tensor, LayerCache], None]  # `kernels.attention.latent.write.write_latents`


class Keys(Protocol):
    """Stands for a cache of transformers'."""

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Take a call's keys [B, n, D]; return those of all tokens that it may choose [B, L, D]."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """An indexer's module in a step.

    run: has its own code choose for some of the step's tokens, as many of each of B rows, of whose L keys are
    `seen` [B, n, L] -> positions [B, n, min(most, L)], or with by_head as `tokens_of_blocks` gives them.
    heads: of its queries. width: of a key. most: tokens that it chooses. parts: what it computes of the
    step's tokens by itself, if its kind is known. by_head: each KV head has a choice of its own.
    """

    run: Callable[[slice, int, Tensor, Keys], Tensor]
    heads: int
    width: int
    most: int
    parts: IndexParts | None = None
    by_head: bool = False


class Piece(NamedTuple):
    """Tokens that are chosen for at once, from `begin` of the step's on: `queries` of each of some rows."""

    begin: int
    queries: int
    rows: tuple[int, ...]
    longest: int  # tokens that the last query of any row sees

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + self.queries * len(self.rows))


def pieces(spans: tuple[Span, ...], indexer: Indexer) -> list[Piece]:
    """Return a step's tokens in pieces of no more than MOST_SCORES numbers, or of one token.

    Rows of one token each go together, and others one by one.
    """
    found: list[Piece] = []
    begin = 0
    for span in spans:
        end, context_len = begin + span.tokens, span.context_len
        first, begin = begin, end
        if context_len == 0:
            continue
        last = found[-1] if found else None
        if span.tokens == 1 and last is not None and last.queries == 1 and last.tokens.stop == first:
            joined = Piece(last.begin, 1, (*last.rows, span.row), max(last.longest, context_len))
            if len(joined.rows) * joined.longest * (indexer.heads + 2 * indexer.width) <= MOST_SCORES:
                found[-1] = joined
                continue
        size = max(MOST_SCORES // (context_len * indexer.heads), 1)
        for at in range(first, end, size):
            queries = min(size, end - at)
            found.append(Piece(at, queries, (span.row,), context_len - (end - at - queries)))
    return found


def keep_keys(indexer: Indexer, batch: ForwardBatch, cache: LayerCache, keep: Keep) -> None:
    """Write the indexer's keys of all tokens to the cache. They are scored by one of them, for nothing."""

    class Kept:
        def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
            keep(keys[0].to(cache.kv.dtype), batch.slots, cache)  # some turn theirs in fp32 (dots3)
            return keys[:, :1]

    one = torch.ones(1, 1, 1, dtype=torch.bool, device=batch.tokens.device)
    indexer.run(slice(None), 1, one, Kept())


def choose_by_scores(
    parts: IndexParts,
    batch: ForwardBatch,
    rows: Tensor,
    longest: int,
    cache: LayerCache,
    most: int,
    by: IndexOperations,
) -> Chosen:
    """Return what `choose` does, by what an indexer of a known kind computes; the host looks at nothing.

    rows [T]: each token's block table. longest: of the contexts, or more.
    """
    tables = batch.decode.block_tables
    longest = max(longest, most)
    q, weights = parts.queries(by.rotate), parts.weights()
    queries = IndexQueries(q, weights, rows, batch.positions, parts.scale, most)
    tokens, size = len(batch.tokens), max(MOST_SCORES // longest, 1)
    found = [
        by.score(queries.part(slice(begin, begin + size)), tables, cache, longest)
        .topk(most, dim=-1, sorted=False)
        .indices
        for begin in range(0, tokens, size)
    ]
    return Chosen(found[0] if len(found) == 1 else torch.cat(found), most)


def choose(
    indexer: Indexer, batch: ForwardBatch, spans: tuple[Span, ...], cut: list[Piece], cache: LayerCache
) -> Chosen:
    """Return what is chosen for a step's tokens, whose keys are in the cache. cut: the step's `pieces`."""
    most = min(indexer.most, max(span.context_len for span in spans))
    blocks = -(-most // cache.block_size)
    positions = batch.positions.new_zeros(len(batch.tokens), blocks * cache.block_size)
    for piece in cut:
        queries = batch.positions[piece.tokens].view(len(piece.rows), piece.queries, 1)
        seen = torch.arange(piece.longest, device=queries.device) <= queries
        best = indexer.run(piece.tokens, len(piece.rows), seen, _Read(piece, batch, seen, cache))
        positions[piece.tokens, : best.shape[-1]] = best.flatten(0, 1).to(positions.dtype)
    return Chosen(positions, most)


def choose_by_head(
    indexer: Indexer, batch: ForwardBatch, cut: list[Piece], cache: LayerCache
) -> ChosenByHead:
    """Return what each KV head chooses for a step's tokens, as `choose` does."""
    positions = batch.positions.new_full((len(batch.tokens), indexer.heads, indexer.most), NONE)
    for piece in cut:
        queries = batch.positions[piece.tokens].view(len(piece.rows), piece.queries, 1)
        seen = torch.arange(piece.longest, device=queries.device) <= queries
        best = indexer.run(piece.tokens, len(piece.rows), seen, _Read(piece, batch, seen, cache))
        positions[piece.tokens, :, : best.shape[-1]] = best.flatten(0, 1).to(positions.dtype)
    counts = (positions != NONE).sum(-1)
    return ChosenByHead(positions.clamp_(min=0), counts, indexer.most)


def tokens_of_blocks(blocks: Tensor, positions: Tensor, size: int) -> Tensor:
    """Return the tokens of chosen blocks [B, n, H, K], of `size` tokens -> [B, n, H, K · size], in order.

    positions [B, n]: of those that choose; what comes after one, and of blocks that are NONE, is NONE, and
    last.
    """
    first = torch.where(blocks == NONE, positions.max() + 1, blocks * size).sort(-1).values.int()
    within = torch.arange(size, dtype=torch.int32, device=blocks.device)
    tokens = (first[..., None] + within).flatten(-2)
    return tokens.masked_fill_(tokens > positions[..., None, None], NONE)


class _Read:
    """Gives the keys of a piece's rows."""

    def __init__(self, piece: Piece, batch: ForwardBatch, seen: Tensor, cache: LayerCache) -> None:
        self._piece, self._batch, self._seen, self._cache = piece, batch, seen, cache

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        size, longest = self._cache.block_size, self._piece.longest
        rows = torch.tensor(self._piece.rows, device=keys.device)
        tables = self._batch.decode.block_tables[rows, : -(-longest // size)].long()
        # What follows a row's own blocks in a table may be anything; its last query sees all that is its own.
        blocks = tables.masked_fill(~self._seen[:, -1, ::size], 0)
        return self._cache.kv[blocks, 0, 0].flatten(1, 2)[:, :longest]
