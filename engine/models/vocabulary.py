"""The vocabulary over ranks: each has some tokens' rows of the embedding and of the output head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.kernels.parallel.ranks import Ranks


def embed(
    tokens: Tensor, table: Tensor, look_up: Callable[[Tensor, Tensor], Tensor], ranks: Ranks | None
) -> Tensor:
    """Look up tokens [T] in a table [V, H], of which each rank has V / ranks rows -> [T, H] on every rank.

    look_up: the same for tokens whose rows are all in the table.
    """
    if ranks is None:
        return look_up(tokens, table)
    rows = len(table)
    local = tokens - ranks.rank * rows
    is_elsewhere = (local < 0) | (local >= rows)
    found = look_up(local.clamp(0, rows - 1), table)
    return ranks.all_reduce(found.masked_fill_(is_elsewhere.unsqueeze(1), 0))


def embed_part(tokens: Tensor, table: Tensor, look_up: Callable[..., Tensor], ranks: Ranks | None) -> Tensor:
    """Do as `embed`, by a look-up that takes a table's first token, too: it gives zeros for others."""
    if ranks is None:
        return look_up(tokens, table)
    return ranks.all_reduce(look_up(tokens, table, ranks.rank * len(table)))


def all_logits(logits: Tensor, vocab_size: int, ranks: Ranks | None) -> Tensor:
    """Gather every rank's logits [S, V / ranks] -> [S, V] on every rank."""
    if ranks is None:
        return logits
    if len(logits) == 0:
        return logits.new_empty(0, vocab_size)
    return ranks.all_gather(logits).transpose(0, 1).reshape(len(logits), -1)[:, :vocab_size]
