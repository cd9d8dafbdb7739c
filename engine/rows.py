"""Device rows: which sequence sits in each, and how far it has come, as numpy columns.

The scheduler's per-step work on running decodes is done on these columns, not on Python objects.
"""

from __future__ import annotations

import numpy as np

from engine.sequence import NO_ROW, Sequence


class Rows:
    """Columns over `size` rows. A row belongs to one sequence from admission until it ends or yields."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sequences: list[Sequence | None] = [None] * size
        self.context = np.zeros(size, np.int32)  # tokens in the cache once all launched steps are done
        self.capacity = np.zeros(size, np.int32)  # tokens that the row's blocks can hold
        self.limit = np.zeros(size, np.int32)  # context at which the sequence has all its tokens
        self.decoding = np.zeros(size, np.bool_)  # prefill is done
        self._free = list(range(size - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, sequence: Sequence) -> int:
        row = self._free.pop()
        sequence.row = row
        self.sequences[row] = sequence
        self.context[row] = 0
        self.capacity[row] = 0
        self.limit[row] = sequence.group.num_prompt + sequence.group.request.params.max_tokens - 1
        self.decoding[row] = False
        return row

    def release(self, sequence: Sequence) -> None:
        row = sequence.row
        assert self.sequences[row] is sequence
        self.sequences[row] = None
        self.decoding[row] = False
        self.context[row] = 0
        sequence.row = NO_ROW
        self._free.append(row)
