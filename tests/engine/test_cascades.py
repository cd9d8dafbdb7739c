"""Cascades of rows that share prefixes, against what their tables say."""

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.arrays import Int32
from quire.engine.schedule.cascade import FEWEST_ROWS, SMALLEST_CASCADE, Cascades
from quire.kernels.attention.cascade import SHORTEST

WIDTH = 6
ROWS = 48
CONTEXTS = [1, SHORTEST.value, SHORTEST.value + 1, 900]


def int32(values: list[int]) -> Int32:
    return np.array(values, np.int32)


@given(data=st.data(), block_size=st.sampled_from([16, 64, 128]))
def test_cascades_are_the_long_rows_that_name_one_block(data: st.DataObject, block_size: int) -> None:
    column = SHORTEST.value // block_size - 1
    cascades = Cascades(ROWS, block_size, WIDTH)
    named = np.zeros(ROWS, np.int32)
    for _ in range(3):
        entry = st.tuples(st.sampled_from([column, column + 1]), st.integers(1, 4))
        changes = data.draw(st.dictionaries(st.integers(0, ROWS - 1), entry))
        size = data.draw(st.sampled_from([1, 40]))
        batch = data.draw(st.dictionaries(st.integers(0, ROWS - 1), st.sampled_from(CONTEXTS), min_size=size))
        for row, (where, block) in changes.items():
            if where == column:
                named[row] = block
        columns, blocks = zip(*changes.values(), strict=True) if changes else ((), ())
        cascades.note(int32(list(changes)), int32(list(columns)), int32(list(blocks)))
        members, cascade_of = cascades.find(int32(list(batch)), int32(list(batch.values())))

        alike = defaultdict(list)
        for index, (row, context) in enumerate(batch.items()):
            if context > SHORTEST.value:
                alike[named[row]].append(index)
        expected = {
            tuple(rank[first : first + WIDTH])
            for rank in alike.values()
            for first in range(0, len(rank), WIDTH)
            if len(rank) - first >= SMALLEST_CASCADE
        }
        if sum(map(len, expected)) < FEWEST_ROWS:
            expected = set()
        found = [tuple(i for i in cascade if i >= 0) for cascade in members.reshape(-1, WIDTH).tolist()]
        assert set(found) == expected
        assert len(found) == len(expected)
        assert len(cascade_of) == (len(batch) if expected else 0)
        for index, cascade in enumerate(cascade_of.tolist()):
            assert (cascade >= 0) == any(index in some for some in found)
            assert cascade < 0 or index in found[cascade]
