"""Rows that ask for more than the sampler does: a grammar, penalties, logit bias, min_tokens, logprobs.

The step samples every row first, in its graph if it has one. Rows that are known here are then drawn again
from their processed logits, so that nobody else pays for them; each rank processes the logits of its own
tokens. So are those with filters, with several ranks that do not write into each other's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.arrays import Int32
from quire.engine.device.logit_biases import LogitBiases, banned_tokens
from quire.engine.device.staging import sent
from quire.engine.device.vocabulary_parts import Searched, VocabularyParts
from quire.engine.schedule.plan import RowStart, StepPlan
from quire.kernels.backend import Backend
from quire.kernels.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class _Wishes:
    """A row's own parameters, besides those of the sampler."""

    top_k: bool
    top_p: bool
    min_p: bool
    constrained: bool
    penalised: bool
    repetition: float
    presence: float
    frequency: float
    biased: bool
    logprobs: int | None

    @classmethod
    def of(cls, start: RowStart) -> _Wishes:
        params = start.params
        random = params.temperature > 0
        return cls(
            top_k=random and params.top_k > 0,
            top_p=random and params.top_p < 1,
            min_p=random and params.min_p > 0,
            constrained=bool(params.grammar),
            penalised=bool(
                params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
            ),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            biased=bool(params.logit_bias or banned_tokens(start)),
            logprobs=start.num_candidates or params.logprobs,
        )

    @property
    def changes_logits(self) -> bool:
        return self.constrained or self.penalised or self.biased

    @property
    def filtered(self) -> bool:
        return self.top_k or self.top_p or self.min_p


class LogitProcessor:
    """Keeps the wishes of the rows, and for penalised rows what tokens they have seen."""

    def __init__(
        self,
        rows: int,
        vocabulary: VocabularyParts,
        device: torch.device,
        backend: Backend,
    ) -> None:
        self._vocabulary = vocabulary
        self._wishes: dict[int, _Wishes] = {}  # of the rows that are drawn again
        self._biases = LogitBiases(vocabulary)
        self._redrawn = np.zeros(rows, np.bool_)  # which those are
        self._logprobs = np.full(rows, -1, np.int32)  # how many candidates each row wants; -1: no logprobs
        self._shape = (rows, vocabulary.count)
        self._device = device
        self._backend = backend
        self._output_counts: Tensor | None = None  # [rows, own tokens] int32; made for the first penalty
        self._in_prompt: Tensor | None = None  # [rows, own tokens] bool

    def start(self, starts: tuple[RowStart, ...]) -> None:
        """Note what rows that begin a sequence ask for, and forget what they asked for before."""
        self._biases.start(starts)
        for start in starts:
            wishes = _Wishes.of(start)
            self._wishes.pop(start.row, None)
            self._redrawn[start.row] = redrawn = self._draws_again(wishes)
            if redrawn:
                self._wishes[start.row] = wishes
            self._logprobs[start.row] = -1 if wishes.logprobs is None else wishes.logprobs
            if wishes.penalised:
                self._count_from_scratch(start)

    def _draws_again(self, wishes: _Wishes) -> bool:
        return wishes.changes_logits or (self._vocabulary.leaves_filters_out and wishes.filtered)

    def wanted_logprobs(self, rows: Int32) -> tuple[Int32, int]:
        """Return the indices of the sampled rows that want logprobs, and the most candidates one wants."""
        asked = self._logprobs[rows]
        return np.flatnonzero(asked >= 0).astype(np.int32), max(0, int(asked.max(initial=0)))

    def redraw(
        self,
        logits: Tensor,
        tokens: Tensor,
        plan: StepPlan,
        state: SamplingState,
        last_tokens: Tensor,
    ) -> None:
        """Draw the plan's tokens [S] again where rows wish it, from processed logits; also in last_tokens."""
        touched = np.flatnonzero(self._redrawn[plan.sample_rows])
        if not len(touched):
            return
        rows = plan.sample_rows[touched]
        device_rows = self._tensor(rows, torch.int32)
        index = self._tensor(touched, torch.int64)
        positions = plan.sample_positions[touched]
        chosen = logits.index_select(0, index)
        wishes = [self._wishes[row] for row in rows.tolist()]
        penalised = [i for i, wish in enumerate(wishes) if wish.penalised]
        if any(wish.changes_logits for wish in wishes):
            chosen = chosen.float()
            own = chosen[:, : self._vocabulary.count]
            if len(plan.masked_samples):
                masked = self._tensor(np.searchsorted(touched, plan.masked_samples), torch.int64)
                masks = self._tensor(plan.masks, torch.int32)
                self._backend.mask_tokens(own, masked, masks, self._vocabulary.first)
            self._add_biases(own, rows, positions)
            if penalised:
                self._penalise(own, penalised, wishes, device_rows)
        where = self._tensor(positions, torch.int32)
        searched = Searched(any(wish.top_k for wish in wishes), any(wish.top_p for wish in wishes))
        drawn = self._vocabulary.sample_filtered(chosen, device_rows, where, state, last_tokens, searched)
        tokens.index_copy_(0, index, drawn)
        if penalised:
            which = self._tensor(penalised, torch.int64)
            self._count(device_rows[which].long(), drawn[which].long())

    def _count(self, rows: Tensor, tokens: Tensor) -> None:
        """Add one to those of the rows' tokens that are this rank's; each row is there once."""
        assert self._output_counts is not None
        if self._vocabulary.count:
            column = tokens.clamp(min=0) - self._vocabulary.first
            is_own = (column >= 0) & (column < self._vocabulary.count)
            self._output_counts[rows, column.clamp(0, self._vocabulary.count - 1)] += is_own

    def _add_biases(self, logits: Tensor, rows: Int32, positions: Int32) -> None:
        which, biases = self._biases.of(rows, positions)
        if len(which):
            logits.index_put_(
                (self._tensor(which, torch.int64), self._tensor(biases.columns, torch.int64)),
                self._tensor(biases.values, torch.float32),
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
        prompt = self._tensor(self._own_columns(start.prompt), torch.int64)
        self._in_prompt[start.row].zero_().index_fill_(0, prompt, True)
        tokens, counts = np.unique(self._own_columns(start.output), return_counts=True)
        self._output_counts[start.row].zero_().index_copy_(
            0, self._tensor(tokens, torch.int64), self._tensor(counts, torch.int32)
        )

    def _own_columns(self, tokens: list[int]) -> npt.NDArray[np.int64]:
        """Return where this rank's logits have those of the tokens that are its own."""
        columns = np.array(tokens, np.int64) - self._vocabulary.first
        return columns[(columns >= 0) & (columns < self._vocabulary.count)]

    def _tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return sent(values, dtype, self._device)
