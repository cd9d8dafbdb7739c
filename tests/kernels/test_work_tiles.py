"""The turns of Hopper's prefill attention, by their own source with NumPy in the place of Gluon."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.attention.hopper_prefill import work_tiles as prefill_turns


class Values(np.ndarray):
    """What Gluon calls a tensor."""

    def to(self, dtype: type) -> Values:
        return self.astype(dtype)


class Pointer:
    """To the elements of an array; an index past its ends is an error, but where a mask leaves it out."""

    def __init__(self, array: list[int], index: Any = 0) -> None:
        self.array, self.index = array, index

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.index + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.index - offset)

    def load(self, mask: Any = True, other: int = 0) -> Any:
        index, mask = np.broadcast_arrays(self.index, mask)
        assert np.all((index >= 0) & (index < len(self.array)) | ~mask)
        found = np.array(self.array)[np.where(mask, index, 0)]
        return np.where(mask, found, other).view(Values) if found.ndim else int(found)


def run_by_python() -> Any:
    """The module's functions, with the few of Gluon's that they call."""
    language = ModuleType("language")
    language.__dict__.update(
        arange=lambda first, last, layout: np.arange(first, last).view(Values),
        load=lambda pointer, mask=True, other=0: pointer.load(mask, other),
        sum=lambda values, axis: int(values.sum(axis)),
        where=lambda condition, this, that: this if condition else that,
        minimum=min,
        maximum=max,
        BlockedLayout=lambda *shape: None,
        int32=np.int32,
    )
    gluon = SimpleNamespace(jit=lambda function: function, language=language)
    names: dict[str, Any] = {"__name__": "turns"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton.experimental", SimpleNamespace(gluon=gluon))
        patch.setitem(sys.modules, "triton.experimental.gluon", gluon)
        exec(Path(prefill_turns.__file__).read_text(), names)
    return SimpleNamespace(**names)


TURNS = run_by_python()


@given(
    decodes=st.integers(0, 300),
    lens=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 60)), min_size=1, max_size=40),
    padding=st.integers(0, 40),
    block_q=st.sampled_from([1, 4, 16, 32, 128]),
    tile=st.sampled_from([64, 128]),
    each=st.integers(1, 7),
)
def test_each_query_has_one_turn(
    decodes: int,
    lens: list[tuple[int, int]],
    padding: int,
    block_q: int,
    tile: int,
    each: int,
) -> None:
    """However many turns a program takes; a sequence of (queries, tokens cached before them)."""
    starts = np.cumsum([decodes, *(queries for queries, _ in lens)]).tolist()
    contexts = [queries + before for queries, before in lens]
    rows = [7 * i for i in range(len(lens))]
    turns = (starts[-1] + padding) // block_q + len(lens)
    plan = (Pointer(rows), Pointer(starts), Pointer(contexts), len(lens), turns)
    taken: Counter[tuple[int, ...]] = Counter()
    for first in range(0, turns, each):
        last = min(first + each, turns)
        work = TURNS.work_of(first, plan, block_q, tile, 4)
        for turn in range(first, last):
            assert work == TURNS.work_of(turn, plan, block_q, tile, 1)
            if work[-1]:
                taken[work] += 1
            work = TURNS.work_after(turn, last, work, plan, block_q, tile, 1)
    wanted: Counter[tuple[int, ...]] = Counter()
    for i, (queries, _) in enumerate(lens):
        for query in range(0, queries, block_q):
            seen = min(contexts[i] - queries + query + block_q, contexts[i])
            wanted[rows[i], starts[i], queries, query, contexts[i], math.ceil(seen / tile)] += 1
    assert taken == wanted
