"""Vectors of whole prompts, from the hidden states of their tokens as chunks are computed."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.arrays import Int32
from quire.engine.models.pooling import Pooling
from quire.engine.schedule.plan import StepPlan


class Pooler:
    """The newest token's hidden state is the vector, or what a row has gathered of its tokens' so far."""

    def __init__(
        self, pooling: Pooling, rows: int, hidden_size: int, head: Tensor | None, device: torch.device
    ) -> None:
        """head: float32 [labels, H] of a model that classifies."""
        self.pooling = pooling
        self.head = head
        gathered = rows if pooling.needs_all else 0
        self._gathered = torch.zeros(gathered, hidden_size, dtype=torch.float32, device=device)

    def inputs(self, plan: StepPlan) -> list[Int32]:
        """Return what `vectors` needs of a plan on the device."""
        begins = plan.context_lens == plan.query_lens
        if self.pooling.tokens == "mean":
            return [plan.rows, plan.query_lens, plan.rows[begins], plan.sample_rows, plan.sample_positions]
        if self.pooling.tokens == "first":
            firsts = np.cumsum(plan.query_lens, dtype=np.int32) - plan.query_lens
            return [plan.rows[begins], firsts[begins], plan.sample_rows]
        return []

    def vectors(self, hidden: Tensor, newest: Tensor, inputs: list[Tensor]) -> Tensor:
        """Return float32 [S, D] of the prompts that are whole with this step.

        hidden: [., H] of the step's tokens, among which newest [S] are the last ones of these prompts; all of
        them unless the newest are enough.
        """
        if self.pooling.tokens == "mean":
            pooled = self._means(hidden, *inputs)
        elif self.pooling.tokens == "first":
            begun, firsts, wanted = inputs
            self._gathered[begun] = hidden[firsts].float()
            pooled = self._gathered[wanted]
        else:
            pooled = hidden[newest].float()
        return pooled if self.head is None else F.linear(pooled, self.head)

    def _means(
        self, hidden: Tensor, rows: Tensor, lengths: Tensor, begun: Tensor, wanted: Tensor, counts: Tensor
    ) -> Tensor:
        """Sum each chunk apart, so that what runs beside it changes nothing."""
        self._gathered[begun] = 0
        # unsafe: that the lengths add up is not looked at, for which the host would wait
        sums = torch.segment_reduce(hidden.float(), "sum", lengths=lengths.long(), axis=0, unsafe=True)
        self._gathered[rows] += sums
        return self._gathered[wanted] / counts.unsqueeze(1)


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
