"""What rows add to logits: biases, and minus infinity where stop tokens must not come yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Int32
from quire.engine.device.vocabulary_parts import VocabularyParts
from quire.engine.schedule.plan import RowStart

BANNED = float("-inf")


class Biases(NamedTuple):
    """Values, and the columns of this rank's logits that they are added to."""

    columns: NDArray[np.int64]
    values: NDArray[np.float32]


_NOTHING = Biases(np.empty(0, np.int64), np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class _Row:
    biases: Biases
    bans: Biases
    banned_until: int  # position before which the bans hold


def banned_tokens(start: RowStart) -> list[int]:
    """Return the tokens that a row must not sample before it has `min_tokens`."""
    params = start.params
    # A grammar's masks see to its stop tokens: it may have to end before min_tokens.
    return sorted(start.stop_tokens) if params.min_tokens and not params.grammar else []


class LogitBiases:
    """Keeps what each row adds, in arrays that are made when it begins: steps only put them together."""

    def __init__(self, vocabulary: VocabularyParts) -> None:
        self._vocabulary = vocabulary
        self._rows: dict[int, _Row] = {}  # of those that add something

    def start(self, starts: tuple[RowStart, ...]) -> None:
        """Note what rows that begin a sequence add, and forget what they added before."""
        made: dict[int, Biases] = {}  # by the mapping that they are of, which a request's samples share
        for start in starts:
            self._rows.pop(start.row, None)
            params, banned = start.params, banned_tokens(start)
            if params.logit_bias or banned:
                biases = made.get(id(params.logit_bias))
                if biases is None:
                    biases = made[id(params.logit_bias)] = self._own(params.logit_bias)
                bans = self._own(dict.fromkeys(banned, BANNED))
                self._rows[start.row] = _Row(biases, bans, start.num_prompt + params.min_tokens)

    def _own(self, biases: Mapping[int, float]) -> Biases:
        """Return those of this rank's tokens."""
        columns = np.array(list(biases), np.int64) - self._vocabulary.first
        values = np.array(list(biases.values()), np.float32)
        is_own = (columns >= 0) & (columns < self._vocabulary.count)
        return Biases(columns[is_own], values[is_own])

    def of(self, rows: Int32, positions: Int32) -> tuple[NDArray[np.int64], Biases]:
        """Return what `rows` [N] add that sample at `positions`, and which of them each value is of."""
        parts = [
            self._at(row, position) for row, position in zip(rows.tolist(), positions.tolist(), strict=True)
        ]
        lengths = [sum(len(each.columns) for each in part) for part in parts]
        columns, values = zip(_NOTHING, *chain.from_iterable(parts), strict=True)
        return np.repeat(np.arange(len(parts)), lengths), Biases(
            np.concatenate(columns), np.concatenate(values)
        )

    def _at(self, row: int, position: int) -> tuple[Biases, ...]:
        own = self._rows.get(row)
        if own is None:
            return ()
        return (own.biases, own.bans) if position < own.banned_until else (own.biases,)
