"""Vectors of whole prompts, from the hidden states of their tokens as chunks are computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.arrays import Int32
from quire.engine.models.pooling import Pooling, PoolingMode
from quire.engine.models.projection_weights import ProjectionWeights
from quire.engine.schedule.plan import RowStart, StepPlan

# What a row gathers of its tokens for each mode; two are quotients of the same sum.
_SUM, _WEIGHTED, _MAX, _FIRST = "sum", "weighted", "max", "first"
_GATHERED: dict[PoolingMode, str] = {
    "first": _FIRST,
    "max": _MAX,
    "mean": _SUM,
    "mean_sqrt": _SUM,
    "weighted": _WEIGHTED,
}


class Pooler:
    """Makes vectors of the hidden states of newest tokens, or of what rows have gathered of all so far."""

    def __init__(
        self,
        pooling: Pooling,
        rows: int,
        hidden_size: int,
        head: Tensor | None,
        projections: Sequence[ProjectionWeights],
        device: torch.device,
    ) -> None:
        """head: float32 [labels, H] of a model that classifies."""
        self.pooling = pooling
        self.head = head
        self.projections = projections
        self._unpooled = np.zeros(rows, np.int32)  # tokens at each row's beginning
        wanted = {_GATHERED[mode] for mode in pooling.modes if mode in _GATHERED}
        self._gathered = {kind: torch.zeros(rows, hidden_size, device=device) for kind in wanted}

    def start(self, starts: tuple[RowStart, ...]) -> None:
        """Note how much of the prompts that rows begin with their vectors are not of."""
        for each in starts:
            self._unpooled[each.row] = each.unpooled

    def inputs(self, plan: StepPlan) -> list[Int32]:
        """Return what `vectors` needs of a plan on the device."""
        if not self.pooling.needs_all:
            return []
        chunks = [plan.rows, plan.query_lens, plan.context_lens, self._unpooled[plan.rows]]
        return [*chunks, plan.sample_rows, plan.sample_positions, self._unpooled[plan.sample_rows]]

    def vectors(self, hidden: Tensor, newest: Tensor, inputs: list[Tensor]) -> Tensor:
        """Return float32 [S, D] of the prompts that are whole with this step.

        hidden: [., H] of the step's tokens, among which newest [S] are the last ones of these prompts; all of
        them unless the newest are enough.
        """
        pooled = hidden[newest].float()
        if inputs:
            self._gather(hidden.float(), *inputs[:4])
            pooled = torch.cat([self._of_mode(mode, pooled, *inputs[4:]) for mode in self.pooling.modes], 1)
        for projection in self.projections:
            pooled = projection(pooled)
        return pooled if self.head is None else F.linear(pooled, self.head)

    def _of_mode(
        self, mode: PoolingMode, newest: Tensor, rows: Tensor, lengths: Tensor, unpooled: Tensor
    ) -> Tensor:
        """Return [S, H] of whole prompts of so many tokens, whose last ones' states are newest [S, H]."""
        if mode == "last":
            return newest
        gathered = self._gathered[_GATHERED[mode]][rows]
        all_, left_out = lengths.double(), unpooled.double()
        divisor = {
            "mean": all_ - left_out,
            "mean_sqrt": (all_ - left_out).sqrt(),
            "weighted": (all_ * (all_ + 1) - left_out * (left_out + 1)) / 2,  # 1, 2, 3 … by position
        }.get(mode)
        return gathered if divisor is None else gathered / divisor.float().unsqueeze(1)

    def _gather(
        self, hidden: Tensor, rows: Tensor, lengths: Tensor, contexts: Tensor, unpooled: Tensor
    ) -> None:
        """Add hidden [T, H] of chunks to their rows, each chunk apart: what runs beside it changes nothing.

        rows, lengths, contexts, unpooled: [R] of each chunk its row, its tokens, those with it and before,
        and those at the beginning that do not count.
        """
        tokens, ends = torch.arange(len(hidden), device=hidden.device), lengths.cumsum(0)
        chunks = torch.repeat_interleave(lengths.long(), output_size=len(hidden))
        places = tokens - (ends - contexts)[chunks]  # in the prompt
        counts = (places >= unpooled[chunks]).unsqueeze(1)
        begins = (contexts == lengths).unsqueeze(1)

        def reduced(values: Tensor, reduction: str) -> Tensor:
            # unsafe: that the lengths add up is not looked at, for which the host would wait
            return torch.segment_reduce(values, reduction, lengths=lengths.long(), axis=0, unsafe=True)

        for kind, gathered in self._gathered.items():
            before = gathered[rows]
            if kind == _FIRST:
                first = ends - contexts + unpooled
                here = ((first >= ends - lengths) & (first < ends)).unsqueeze(1)
                gathered[rows] = torch.where(here, hidden[first.clamp(0, len(hidden) - 1)], before)
            elif kind == _MAX:
                found = reduced(hidden.where(counts, -torch.inf), "max")
                gathered[rows] = torch.where(begins, found, torch.maximum(before, found))
            else:
                weighted = hidden * (places + 1).unsqueeze(1) if kind == _WEIGHTED else hidden
                found = reduced(weighted.where(counts, 0), "sum")
                gathered[rows] = torch.where(begins, found, before + found)


def score_head(pooling: Pooling, head: Tensor | None) -> Tensor | None:
    """Return float32 [labels, H] of a model whose head is `head`, None if it has none.

    Of a head for text it is the difference of two tokens' rows, or one token's.
    """
    if head is None or not pooling.labels:
        return None
    if not pooling.label_tokens:
        return head.float()
    rows = head[list(pooling.label_tokens)].float()
    return rows[:1] - rows[1:].sum(0, keepdim=True)
