"""Texts cut in every way into pieces, as a model's tokens may cut them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise


def splits(text: str) -> Iterator[list[str]]:
    """Every way into one, two and three pieces, and the way into characters."""
    yield list(text)
    places = range(1, len(text))
    for cuts in ((), *combinations(places, 1), *combinations(places, 2)):
        ends = [0, *cuts, len(text)]
        yield [text[a:b] for a, b in pairwise(ends)]
