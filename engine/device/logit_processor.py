"""Rows that ask for more than the sampler does: a grammar, penalties, logit bias, min_tokens, logprobs.

The step samples every row first, in its graph if it has one. Rows that are known here are then drawn again
from their processed logits, so that nobody else pays for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.arrays import Int32
from quire.engine.device.staging import sent
from quire.engine.models.vocabulary import all_logits
from quire.engine.schedule.plan import RowStart, StepPlan
from quire.kernels.backend import Backend
from quire.kernels.parallel.ranks import Ranks
from quire.kernels.sampling.state import SamplingState

BANNED = float("-inf")


@dataclass(frozen=True, slots=True)
class _Wishes:
    """A row's own parameters, besides those of the sampler."""

    filtered: bool  # by top-k, top-p or min-p
    constrained: bool
    penalised: bool
    repetition: float
    presence: float
    frequency: float
    bias: dict[int, float]
    banned_until: int  # position before which the stop tokens must not be sampled
    stop_tokens: list[int]
    logprobs: int | None

    @classmethod
    def of(cls, start: RowStart) -> _Wishes:
        params = start.params
        return cls(
            filtered=bool(params.temperature and (params.top_k or params.top_p < 1 or params.min_p)),
            constrained=bool(params.grammar),
            penalised=bool(
                params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
            ),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            bias=params.logit_bias,
            banned_until=start.num_prompt + params.min_tokens,
            # A grammar's masks see to its stop tokens: it may have to end before min_tokens.
            stop_tokens=sorted(start.stop_tokens) if params.min_tokens and not params.grammar else [],
            logprobs=start.num_candidates or params.logprobs,
        )

    @property
    def changes_logits(self) -> bool:
        return bool(self.constrained or self.penalised or self.bias or self.stop_tokens)


class LogitProcessor:
    """Keeps the wishes of the rows, and for penalised rows what tokens they have seen."""

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device,
        backend: Backend,
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: those that the vocabulary is divided among: rows with filters are drawn again, too."""
        self._ranks = ranks
        self._wishes: dict[int, _Wishes] = {}
        self._shape = (rows, vocab_size)
        self._device = device
        self._backend = backend
        self._output_counts: Tensor | None = None  # [rows, V] int32; made when the first penalty comes
        self._in_prompt: Tensor | None = None  # [rows, V] bool

    def start(self, starts: tuple[RowStart, ...]) -> None:
        """Note what rows that begin a sequence ask for, and forget what they asked for before."""
        for start in starts:
            wishes = _Wishes.of(start)
            self._wishes.pop(start.row, None)
            if self._draws_again(wishes) or wishes.logprobs is not None:
                self._wishes[start.row] = wishes
            if wishes.penalised:
                self._count_from_scratch(start)

    def _draws_again(self, wishes: _Wishes) -> bool:
        return wishes.changes_logits or (self._ranks is not None and wishes.filtered)

    def wanted_logprobs(self, rows: list[int]) -> tuple[list[int], int]:
        """Return the indices of the sampled rows that want logprobs, and the most candidates one wants."""
        if not self._wishes:
            return [], 0
        wanted = {i: self._wishes[row].logprobs for i, row in enumerate(rows) if row in self._wishes}
        asked = {i: k for i, k in wanted.items() if k is not None}
        return list(asked), max(asked.values(), default=0)

    def redraw(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: list[int],
        plan: StepPlan,
        state: SamplingState,
        last_tokens: Tensor,
    ) -> None:
        """Draw the tokens [S] of rows that wish it again, in place and in last_tokens, from processed logits.

        `rows` are those of the plan's samples.
        """
        touched = [
            i for i, row in enumerate(rows) if row in self._wishes and self._draws_again(self._wishes[row])
        ]
        if not touched:
            return
        device_rows = self._tensor([rows[i] for i in touched], torch.int32)
        index = self._tensor(touched, torch.int64)
        positions = plan.sample_positions[touched]
        chosen = all_logits(logits.index_select(0, index), self._shape[1], self._ranks).float()
        if len(plan.masked_samples):
            masked = self._tensor(np.searchsorted(touched, plan.masked_samples), torch.int64)
            self._backend.mask_tokens(chosen, masked, self._tensor(plan.masks, torch.int32))
        wishes = [self._wishes[rows[i]] for i in touched]
        self._add_biases(chosen, wishes, positions)
        penalised = [i for i, wish in enumerate(wishes) if wish.penalised]
        if penalised:
            self._penalise(chosen, penalised, wishes, device_rows)
        where = self._tensor(positions, torch.int32)
        drawn = self._backend.sample(chosen, device_rows, where, state, last_tokens)
        tokens.index_copy_(0, index, drawn)
        if penalised:
            which = self._tensor(penalised, torch.int64)
            counted_rows, counted = device_rows[which].long(), drawn[which].long().clamp(min=0)
            assert self._output_counts is not None
            self._output_counts[counted_rows, counted] += 1  # a row is sampled once a step: no duplicates

    def _add_biases(self, logits: Tensor, wishes: list[_Wishes], positions: Int32) -> None:
        entries: list[tuple[int, int, float]] = []
        for i, (wish, position) in enumerate(zip(wishes, positions.tolist(), strict=True)):
            entries += [(i, token, bias) for token, bias in wish.bias.items()]
            if position < wish.banned_until:
                entries += [(i, token, BANNED) for token in wish.stop_tokens]
        if entries:
            where, what, bias = zip(*entries, strict=True)
            logits.index_put_(
                (self._tensor(where, torch.int64), self._tensor(what, torch.int64)),
                self._tensor(bias, torch.float32),
                accumulate=True,
            )

    def _penalise(self, logits: Tensor, which: list[int], wishes: list[_Wishes], rows: Tensor) -> None:
        assert self._output_counts is not None and self._in_prompt is not None
        index = self._tensor(which, torch.int64)
        rows = rows[index].long()
        counts = self._output_counts[rows]
        generated = counts > 0
        values = [(wishes[i].repetition, wishes[i].presence, wishes[i].frequency) for i in which]
        repetition, presence, frequency = self._tensor(values, torch.float32).unsqueeze(-1).unbind(1)
        x = logits[index]
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(generated | self._in_prompt[rows], repeated, x)
        logits[index] = x - frequency * counts - presence * generated

    def _count_from_scratch(self, start: RowStart) -> None:
        if self._output_counts is None or self._in_prompt is None:
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        prompt = self._tensor(start.prompt, torch.int64)
        self._in_prompt[start.row].zero_().index_fill_(0, prompt, True)
        tokens, counts = np.unique(np.array(start.output, np.int64), return_counts=True)
        self._output_counts[start.row].zero_().index_copy_(
            0, self._tensor(tokens, torch.int64), self._tensor(counts, torch.int32)
        )

    def _tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return sent(values, dtype, self._device)
