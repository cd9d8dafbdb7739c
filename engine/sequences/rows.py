"""Device rows: the sequence in each, and how far it has come, as numpy columns.

The work of a step on running decodes is done on these columns; only what is special about a row is looked at
as Python objects.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Int32, empty_int32
from quire.engine.messages import MAX_SEQUENCES
from quire.engine.sequences.row_tokens import RowTokens
from quire.engine.sequences.sequence import Sequence, SequenceGroup

Index = NDArray[np.intp]
"""Rows, as numpy indexes with them; others it would convert each time."""

Overrides = tuple[Int32, Int32]
"""Rows that decode on from a token of which the host knows better than the device, and these tokens."""

DEVICE_KNOWS = -1  # instead of a token
NO_OVERRIDES: Overrides = (empty_int32(), empty_int32())


def table_stride(rows: int) -> int:
    """Return how many block tables a cache group has on the device, one for each of `rows` and some that pad.

    A multiple of four, so that each group's begin where kernels read 16 bytes at once.
    """
    return (rows + 4) // 4 * 4


class Samples(msgspec.Struct, frozen=True):
    """The sequences that a step samples S tokens of."""

    rows: Int32  # [S]
    row_index: Index  # [S] the same, to index with
    sequences: list[Sequence]
    request_ids: list[int]
    indices: list[int]  # of the sequences in their groups
    needs_host: NDArray[np.bool_]  # [S] there is more to a token than the token
    limit: Int32  # [S] position of the last token that the sequence may have
    constrained: list[int]  # which of the S samples a grammar constrains
    searching: dict[SequenceGroup, dict[int, int]]  # those with beams: each beam's sample, by its index
    chosen_from: NDArray[np.bool_]  # [S] a beam's, among whose candidates its group chooses


class Rows:
    """Columns over `size` rows. A row belongs to one sequence until it ends or is preempted."""

    def __init__(self, size: int, max_tokens: int, block_size: int) -> None:
        """`max_tokens`: most that a sequence may have, in blocks of `block_size`."""
        self.size = size
        self.stride = table_stride(size)
        self.tokens = RowTokens(size, max_tokens, block_size)
        self.numbers = np.arange(size, dtype=np.int32)
        self.ones = np.ones(size, np.int32)
        self.sequences: list[Any] = [None] * size  # Sequence | None
        self.context = np.zeros(size, np.int32)  # tokens in the cache once all launched steps are done
        self.capacity = np.zeros(size, np.int32)  # tokens that the row's blocks can hold
        self.given_back = np.zeros(size, np.int64)  # tokens behind windows, over all tables of the row
        self.limit = np.zeros(size, np.int32)  # context at which the sequence has all its tokens
        self.decoding = np.zeros(size, np.bool_)  # prefill is done, and nothing else is in the way
        self.in_lockstep = np.zeros(size, np.bool_)  # as the sequence's group is
        self._override = np.full(size, DEVICE_KNOWS, np.int32)  # the token that the row decodes on from
        self._overrides_any = False
        self._needs_host = np.zeros(size, np.bool_)
        self._constrained = np.zeros(size, np.bool_)
        self._searches = np.zeros(size, np.bool_)  # the sequence's group has beams
        # What samples are booked by, as Python's own objects.
        self._sequence: NDArray[Any] = np.full(size, None, object)  # as in `sequences`
        self._request_id: NDArray[Any] = np.full(size, None, object)
        self._index: NDArray[Any] = np.full(size, None, object)  # of the sequence in its group
        self.numbers.flags.writeable = self.ones.flags.writeable = False
        self._order = np.zeros(size, np.int64)  # by arrival, then by index in the group
        self._free = list(range(size - 1, -1, -1))
        self._decodes: Index | None = None  # None: stale
        self._sampled: Index = np.empty(0, np.intp)  # whose samples were asked for last
        self._samples: Samples | None = None  # None: stale

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.size - len(self._free)

    def assign(self, sequence: Sequence) -> int:
        row = self._free.pop()
        group = sequence.group
        sequence.enter_row(row, self.tokens)
        self.sequences[row] = self._sequence[row] = sequence
        self._constrained[row] = sequence.constraint is not None
        self._searches[row] = group.beams is not None
        self._request_id[row] = group.request.id
        self._index[row] = sequence.index
        self.context[row] = 0
        self.capacity[row] = 0
        self.limit[row] = group.num_prompt + group.request.params.max_tokens - 1
        self.decoding[row] = False
        self.in_lockstep[row] = group.in_lockstep
        self._order[row] = group.order * MAX_SEQUENCES + sequence.index
        self.note_special(sequence)
        return row

    def release(self, sequence: Sequence) -> None:
        row = sequence.row
        assert self.sequences[row] is sequence
        self.sequences[row] = self._sequence[row] = None
        self._samples = None  # which may name the sequence, and would keep it alive
        self.set_decoding(sequence, False)
        self._override[row] = DEVICE_KNOWS
        self.context[row] = 0
        sequence.leave_row()
        self._free.append(row)

    def note_special(self, sequence: Sequence) -> None:
        """Note whether what comes for `sequence` is more than tokens."""
        group = sequence.group
        special = group.in_lockstep or group.request.params.logprobs is not None
        self._needs_host[sequence.row] = special or group.first_output_due
        self._samples = None

    def set_decoding(self, sequence: Sequence, may: bool) -> None:
        self.decoding[sequence.row] = may
        self._decodes = None

    def pause(self, rows: Index) -> None:
        """Let the sequences in `rows` not decode for now."""
        self.decoding[rows] = False
        self._decodes = None

    def override(self, rows: Index | list[int], tokens: Int32) -> None:
        """Have the sequences in `rows` decode on from these tokens, not from what the device has."""
        self._override[rows] = tokens
        self._overrides_any = True

    def take_overrides(self) -> Overrides:
        """Return what is overridden of rows that decode, once."""
        if not self._overrides_any:
            return NO_OVERRIDES
        overridden = self._override != DEVICE_KNOWS
        rows = np.flatnonzero(overridden & self.decoding)
        tokens = self._override[rows]
        self._override[rows] = DEVICE_KNOWS
        self._overrides_any = len(rows) < int(np.count_nonzero(overridden))
        return rows.astype(np.int32), tokens

    def resume(self, rows: list[int], tokens: list[int]) -> None:
        """Append a token to each of the sequences in `rows`, which may decode again, from it on."""
        index, newest = np.array(rows, np.intp), np.array(tokens, np.int32)
        self.tokens.append_all(index, newest)
        self.override(index, newest)
        self.decoding[index] = True
        self._decodes = None

    def decodes(self) -> Index:
        """Return the rows that may decode, the oldest group's first. The same array until they change."""
        if self._decodes is None:
            rows = np.flatnonzero(self.decoding)
            self._decodes = rows[np.argsort(self._order[rows])]
        return self._decodes

    def samples(self, rows: Index) -> Samples:
        """Return the sequences whose tokens `rows` are going to sample."""
        if rows is not self._sampled:
            if not np.array_equal(rows, self._sampled):
                self._samples = None
            self._sampled = rows
        if self._samples is None:
            sequences = self._sequence[rows].tolist()
            indices = self._index[rows].tolist()
            chosen_from = self._searches[rows]
            searching: defaultdict[SequenceGroup, dict[int, int]] = defaultdict(dict)
            for i in chosen_from.nonzero()[0].tolist():
                searching[sequences[i].group][indices[i]] = i
            self._samples = Samples(
                rows.astype(np.int32),
                rows,
                sequences,
                self._request_id[rows].tolist(),
                indices,
                self._needs_host[rows],
                self.limit[rows],
                np.flatnonzero(self._constrained[rows]).tolist(),
                searching,
                chosen_from,
            )
        return self._samples
