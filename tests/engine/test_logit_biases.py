"""What rows add to logits, against a plain reading of their parameters."""

from __future__ import annotations

import random
from collections.abc import ItemsView, ValuesView

import numpy as np
import pytest

from quire.engine.device.logit_biases import BANNED, LogitBiases
from quire.engine.device.vocabulary_parts import VocabularyParts
from quire.engine.messages import SamplingParams
from quire.engine.schedule.plan import RowStart
from quire.kernels.backend import torch_backend

VOCAB, ROWS = 40, 6


class Part(VocabularyParts):
    """Tokens `first` to `end` - 1."""

    def __init__(self, first: int, end: int) -> None:
        super().__init__(VOCAB, torch_backend(), None)
        self.first, self.count = first, end - first


def plain(start: RowStart, position: int, part: Part) -> list[tuple[int, float]]:
    """The columns of a row's logits, and what is added there, in order."""
    params = start.params
    added = list(params.logit_bias.items())
    if params.min_tokens and not params.grammar and position < start.num_prompt + params.min_tokens:
        added += [(token, BANNED) for token in sorted(start.stop_tokens)]
    return [
        (token - part.first, float(np.float32(value)))
        for token, value in added
        if 0 <= token - part.first < part.count
    ]


def random_starts(rng: random.Random) -> list[RowStart]:
    """Samples of a request, in any rows; some of its biases may be of stop tokens."""
    params = SamplingParams(
        logit_bias={rng.randrange(VOCAB): rng.uniform(-99, 99) for _ in range(rng.choice([0, 3, 20]))},
        min_tokens=rng.choice([0, 4]),
        grammar=rng.choice(["", "", "any text"]),
        n=2,
        seed=1,
    )
    stops = frozenset(rng.sample(range(VOCAB), rng.choice([0, 5])))
    rows = rng.sample(range(ROWS), 2)
    return [RowStart(row, i, params, rng.randint(1, 3), stops, [], [], 0) for i, row in enumerate(rows)]


@pytest.mark.parametrize("seed", range(30))
def test_each_row_adds_what_its_request_says(seed: int) -> None:
    rng = random.Random(seed)
    part = Part(*rng.choice([(0, VOCAB), (13, 27), (20, 20)]))
    biases, began = LogitBiases(part), dict[int, RowStart]()
    for _ in range(12):
        starts = [start for _ in range(rng.randint(0, 2)) for start in random_starts(rng)]
        biases.start(tuple(starts))
        began |= {start.row: start for start in starts}
        rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
        positions = [rng.randint(1, 8) for _ in rows]
        expected = [
            (i, *entry)
            for i, (row, position) in enumerate(zip(rows, positions, strict=True))
            for entry in (plain(began[row], position, part) if row in began else [])
        ]
        which, added = biases.of(np.array(rows, np.int32), np.array(positions, np.int32))
        assert (
            list(zip(which.tolist(), added.columns.tolist(), added.values.tolist(), strict=True)) == expected
        )
        assert (which.dtype, added.columns.dtype, added.values.dtype) == (np.int64, np.int64, np.float32)


class Read(dict[int, float]):
    """Counts how often its values are read."""

    times = 0

    def items(self) -> ItemsView[int, float]:
        self.times += 1
        return super().items()

    def values(self) -> ValuesView[float]:
        self.times += 1
        return super().values()


def test_the_biases_of_a_request_are_read_once_for_all_its_samples_and_steps() -> None:
    read = Read({i: 1.0 for i in range(20)})
    params = SamplingParams(logit_bias=read, n=ROWS, seed=1)
    biases = LogitBiases(Part(0, VOCAB))
    read.times = 0
    biases.start(tuple(RowStart(row, row, params, 1, frozenset(), [], [], 0) for row in range(ROWS)))
    for position in range(1, 9):
        which, added = biases.of(np.arange(ROWS, dtype=np.int32), np.full(ROWS, position, np.int32))
        assert len(which) == len(added.values) == 20 * ROWS
    assert read.times == 1
