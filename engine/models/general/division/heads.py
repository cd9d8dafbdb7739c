"""Which heads of an attention call are a rank's: its code may give those alone, or all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from quire.engine.models.attention_shape import AttentionShape
from quire.engine.models.general.attention import Call
from quire.engine.models.general.unsupported import UnsupportedAttention
from quire.kernels.attention.chosen_by_head import ChosenByHead
from quire.kernels.parallel.ranks import Ranks


def heads_of_rank(call: Call, shape: AttentionShape, ranks: Ranks) -> tuple[Call, bool]:
    """Return a call of this rank's heads, and whether queries of all heads were given.

    shape: what the rank computes. Raises UnsupportedAttention for heads that are neither.
    """

    def of_rank(heads: Tensor, count: int, copies: int, what: str) -> Tensor:
        if heads.shape[0] == count * ranks.size // copies:
            return heads.narrow(0, ranks.rank // copies * count, count)
        if heads.shape[0] != count:
            raise UnsupportedAttention(
                f"a rank has {heads.shape[0]} {what} in a layer, where it should have {count}"
            )
        return heads

    expansion = call.expansion
    if expansion is not None:
        weight = of_rank(expansion.weight, shape.heads, 1, "heads of keys")
        expansion = replace(expansion, weight=weight)
    chosen = call.chosen
    if isinstance(chosen, ChosenByHead):
        chosen = chosen.of_heads(partial(of_rank, count=shape.kv_heads, copies=shape.copies, what="choices"))
    own = replace(
        call,
        q=of_rank(call.q, shape.heads, 1, "heads"),
        k=of_rank(call.k, shape.kv_heads, shape.copies, "KV heads"),
        v=of_rank(call.v, shape.kv_heads, shape.copies, "KV heads"),
        sinks=None if call.sinks is None else of_rank(call.sinks, shape.heads, 1, "sinks"),
        slopes=None if call.slopes is None else of_rank(call.slopes, shape.heads, 1, "slopes"),
        expansion=expansion,
        chosen=chosen,
    )
    return own, call.q.shape[0] != shape.heads
