"""Grammars whose compilation and masks take a number of looks, whatever time those take."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import numpy as np
from llguidance import LLMatcher

from quire.engine.arrays import Int32
from quire.engine.sequences.grammar import Constraint, Grammars, MaskFinder, Search
from tests.engine.toy_grammar import VOCABULARY


class LateSearch(Search):
    """Masks are there at the `looks`-th look, or when they are waited for."""

    def __init__(self, places: list[tuple[LLMatcher, int]], masks: Int32, looks: int) -> None:
        self.found = [(row, np.frombuffer(matcher.compute_bitmask(), np.int32)) for matcher, row in places]
        self.masks = masks
        self.looks = looks

    def ends(self, seconds: float | None) -> bool:
        self.looks -= 1
        if self.looks > 0 and seconds is not None:
            return False
        for row, mask in self.found:
            self.masks[row] = mask
        return True

    @property
    def failure(self) -> str | None:
        return None


class LateFinder(MaskFinder):
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def begin(self, places: list[tuple[LLMatcher, int]], masks: Int32) -> Search:
        return LateSearch(places, masks, self.rng.choice([0, 0, 2, 9]))


class LateGrammars(Grammars):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(lambda: VOCABULARY)
        self._finder = LateFinder(rng)  # type: ignore[misc]


class LateCompilation(Future[Constraint]):
    def __init__(self, constraint: Constraint, looks: int) -> None:
        super().__init__()
        self.constraint, self.looks = constraint, looks

    def done(self) -> bool:
        self.looks -= 1
        if self.looks == 0:
            self.set_result(self.constraint)
        return super().done()


class LateWorker:
    """In place of the thread that compiles."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def submit(self, function: Any, grammar: str) -> Future[Constraint]:
        return LateCompilation(function(grammar), self.rng.randint(1, 6))
