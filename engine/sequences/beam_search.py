"""Beam search, the selection step: which candidates go on, which are finished, when the search is over.

Pure and on the host: log-probabilities in, the next live beams out. Forking block tables is the caller's.
The search is that of transformers 5 (`GenerationMixin._beam_search`): sequences, scores and stopping are
equal, in fp32 arithmetic of the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

EarlyStopping = bool | Literal["never"]

# Up to here length ** penalty of any length that a request may ask for (2**24) fits a float32.
MAX_LENGTH_PENALTY = 5.0
NOT_A_NUMBER = "the log-probabilities of a beam are NaN"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence."""

    tokens: list[int]  # generated, a stopping token included
    score: float  # cumulative_logprob / len(tokens) ** length_penalty
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]
    stop_token: int | None


class BeamStep(msgspec.Struct, frozen=True):
    """The next live beams, best first: beam i continues the old beam parents[i] with tokens[i].

    At most `width` of them, fewer only where the vocabulary leaves no more; none when the search is over.
    """

    parents: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Finished:
    score: float
    cumulative_logprob: float
    parent: int  # beam after `length - 1` steps
    token: int  # the last one
    length: int


@dataclass(eq=False, repr=False)
class BeamSearch:
    """The search over one prompt. Call `advance` with the candidates of each step until `done`.

    `early_stopping`: True ends the search as soon as `width` hypotheses are finished, False when the best
    live beam at its present length would not enter them, "never" when it could not at any length.
    `length_penalty` above 0 favours long hypotheses, below 0 short ones. Before `min_tokens` tokens are
    generated no stop token is chosen. Raises ValueError for values that make no search.
    """

    width: int
    num_return: int
    max_tokens: int
    stop_tokens: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    min_tokens: int = 0
    done: bool = field(default=False, init=False)
    # Of each live beam, the cumulative log-probability: a float32.
    _totals: list[float] = field(default_factory=lambda: [0.0], init=False)
    # Tokens are read back along the parents, once, at the end.
    _steps: list[BeamStep] = field(default_factory=list, init=False)
    _finished: list[_Finished] = field(default_factory=list, init=False)  # best first, at most width

    def __post_init__(self) -> None:
        width, num_return, penalty = self.width, self.num_return, self.length_penalty
        if not 1 <= num_return <= width:
            raise ValueError(f"num_return must be between 1 and the beam width {width}, got {num_return}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not abs(penalty) <= MAX_LENGTH_PENALTY:  # also false for NaN
            raise ValueError(
                f"length_penalty must be between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}, "
                f"got {penalty}"
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f'early_stopping must be true, false or "never", got {self.early_stopping!r}')

    @property
    def candidates_per_beam(self) -> int:
        """Return how many of a beam's best tokens `advance` needs (all, if the vocabulary is smaller).

        Wanted are the `width` best that do not stop and the stop tokens ahead of them, and one beam holds no
        more of either. The `max(2, 1 + stop tokens) * width` best over all beams, which transformers takes,
        hold nothing else of use.
        """
        return self.width + len(self.stop_tokens)

    def advance(self, top_tokens: NDArray[np.int32], top_logprobs: NDArray[np.float32]) -> BeamStep:
        """Choose among the candidates of each live beam, in the order of the last BeamStep.

        top_tokens, top_logprobs: [B, K], best first, log_softmax of the raw logits; B is 1 at the first
        step, K at least `candidates_per_beam` or the vocabulary. Equal totals go to the lower beam, then to
        the earlier candidate. Raises FloatingPointError if there is a NaN.
        """
        if self.done or len(top_tokens) != len(self._totals):
            expected = "no more" if self.done else str(len(self._totals))
            raise ValueError(f"candidates of {expected} beams expected, got those of {len(top_tokens)}")
        (step,) = advance_all([self], top_tokens[None], top_logprobs[None])
        if step is None:
            raise FloatingPointError(NOT_A_NUMBER)
        return step

    def _go_on(self, totals: list[float], tokens: list[int], parents: list[int]) -> BeamStep | None:
        """Go on with the best candidates if nothing ends by it, as at most steps; else return None."""
        is_last = len(self._steps) + 1 == self.max_tokens
        if is_last or len(self._finished) == self.width or not self.stop_tokens.isdisjoint(tokens):
            return None
        return self._take(totals, tokens, parents)

    def _choose(self, totals: list[float], tokens: list[int], parents: list[int]) -> BeamStep:
        """Go on, or not, after a step of these candidates, the best of all beams, best first."""
        length = len(self._steps) + 1
        stops = [token in self.stop_tokens for token in tokens]
        too_early = length <= self.min_tokens
        eligible = [i for i, total in enumerate(totals) if total > -math.inf and not (too_early and stops[i])]
        is_last = length == self.max_tokens
        for i in eligible[: self.width]:
            if is_last or stops[i]:
                score = self._score(totals[i], length)
                self._finished.append(_Finished(score, totals[i], parents[i], tokens[i], length))
        self._finished.sort(key=lambda finished: -finished.score)  # stable: earlier ones win ties
        del self._finished[self.width :]

        live = [] if is_last else [i for i in eligible if not stops[i]][: self.width]
        if not live or (len(self._finished) == self.width and self._is_over(totals[live[0]], length)):
            self.done = True
            return BeamStep([], [])
        return self._take([totals[i] for i in live], [tokens[i] for i in live], [parents[i] for i in live])

    def _take(self, totals: list[float], tokens: list[int], parents: list[int]) -> BeamStep:
        """Go on with these, best first."""
        self._totals = totals
        step = BeamStep(parents, tokens)
        self._steps.append(step)
        return step

    def result(self) -> list[Hypothesis]:
        """Return the `num_return` best hypotheses, best first.

        Fewer only where no more sequences exist (transformers fills up with copies of score -1e9 there).
        """
        if not self.done:
            raise RuntimeError("the search is not over: there is no result yet")
        return [self._hypothesis(finished) for finished in self._finished[: self.num_return]]

    def _score(self, total: float, length: int) -> float:
        # A quotient of two float32 that is rounded to double and then to float32 is correctly rounded.
        return float(np.float32(total / float(np.float32(length**self.length_penalty))))

    def _is_over(self, best_live_total: float, length: int) -> bool:
        """Return whether no live beam enters the `width` hypotheses that are finished."""
        if self.early_stopping is True:
            return True
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_tokens  # where the penalty leaves most of a total
        return self._score(best_live_total, length) <= self._finished[-1].score

    def _hypothesis(self, finished: _Finished) -> Hypothesis:
        tokens = [finished.token]
        beam = finished.parent
        for step in reversed(self._steps[: finished.length - 1]):
            tokens.append(step.tokens[beam])
            beam = step.parents[beam]
        tokens.reverse()
        stopped = finished.token in self.stop_tokens
        return Hypothesis(
            tokens=tokens,
            score=finished.score,
            cumulative_logprob=finished.cumulative_logprob,
            finish_reason="stop" if stopped else "length",
            stop_token=finished.token if stopped else None,
        )


def advance_all(
    searches: list[BeamSearch], top_tokens: NDArray[np.int32], top_logprobs: NDArray[np.float32]
) -> list[BeamStep | None]:
    """`BeamSearch.advance` of N searches at once: [N, B, K] int32 and fp32; None where there is a NaN.

    Width and the number of stop tokens are the same for all, and none is over. Of one with fewer than B live
    beams the others' candidates are not chosen; they are NaN only if a live beam's are.
    """
    most = top_logprobs.shape[1]
    width, numbers = searches[0].width, np.arange(len(searches))[:, None]
    before: list[float] = []
    for search in searches:
        before += search._totals
        if len(search._totals) < most:
            before += [-math.inf] * (most - len(search._totals))
    totals = (top_logprobs + np.array(before, np.float32).reshape(-1, most, 1)).reshape(len(searches), -1)
    invalid = np.isnan(totals.max(axis=1))
    totals[invalid] = 0.0  # as many are found among them then as in other rows
    tokens = top_tokens.reshape(len(searches), -1)
    best = _best_first(totals, (1 + len(searches[0].stop_tokens)) * width)
    first = best[:, :width]
    first_totals = totals[numbers, first]
    enough = (first.shape[1] == width) & (first_totals[:, -1] > -math.inf) & ~invalid
    columns = first_totals, tokens[numbers, first], first // top_tokens.shape[2]
    steps: list[BeamStep | None] = [
        search._go_on(some_totals, some_tokens, parents) if may else None
        for search, may, some_totals, some_tokens, parents in zip(
            searches, enough.tolist(), *(each.tolist() for each in columns), strict=True
        )
    ]
    for i in np.flatnonzero(~invalid).tolist():
        if steps[i] is None:
            chosen = totals[i, best[i]], tokens[i, best[i]], best[i] // top_tokens.shape[2]
            steps[i] = searches[i]._choose(*(each.tolist() for each in chosen))
    return steps


def _best_first(totals: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Return each row's indices of the `count` greatest (or all), greatest first, equal ones in order."""
    if totals.shape[1] <= max(count, 256):  # where sorting all is quicker than parting the best from the rest
        return (-totals).argsort(axis=1, kind="stable")[:, :count]
    at_least = np.partition(totals, -count, axis=1)[:, -count]
    best = np.empty((len(totals), count), np.intp)
    for row, least, places in zip(totals, at_least, best, strict=True):
        candidates = np.flatnonzero(row >= least)
        places[:] = candidates[(-row[candidates]).argsort(kind="stable")[:count]]
    return best
