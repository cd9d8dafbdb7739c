"""The tokens of the sequences that sit in rows, side by side."""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
from numpy.typing import NDArray

from quire.engine.arrays import Int32, as_blocks


class RowTokens:
    """A line of int32 for each row. A step writes its tokens by one assignment, however long the lines are.

    Each line has room for `max_tokens`, and takes memory as far as it was ever written to: 1024 rows of
    131,072 tokens are 0.5 GB of addresses.
    """

    def __init__(self, num_rows: int, max_tokens: int, block_size: int) -> None:
        # An odd number of blocks: lines of a power of two would compete for the same sets of the caches.
        self._blocks_per_row = -(-max_tokens // block_size) | 1
        self._row_size = self._blocks_per_row * block_size
        num_tokens = num_rows * self._row_size
        # Not from numpy, which asks for huge pages: one would hold the beginnings of many lines.
        memory = mmap(-1, num_tokens * np.dtype(np.int32).itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        self._tokens = np.frombuffer(memory, np.int32)
        self._blocks = as_blocks(self._tokens, block_size)
        self._last = np.full(num_rows, -1, np.int32)  # position of each line's newest token

    def of(self, row: int) -> Int32:
        """[N] the tokens in `row`: a view, not to be kept until others are written there."""
        first = row * self._row_size
        return self._tokens[first : first + self.length(row)]

    def length(self, row: int) -> int:
        return self._last.item(row) + 1

    def put(self, row: int, tokens: Int32) -> None:
        """`tokens` [N] instead of what was in `row`."""
        self._last[row] = len(tokens) - 1
        self.of(row)[:] = tokens

    def copy(self, source: int, destination: int) -> None:
        """The tokens in row `source` instead of what was in row `destination`."""
        self._last[destination] = last = self._last.item(source)
        begin, to = source * self._row_size, destination * self._row_size
        self._tokens[to : to + last + 1] = self._tokens[begin : begin + last + 1]

    def clear(self, row: int) -> None:
        """Nobody sits in `row` any more."""
        self._last[row] = -1

    def append(self, row: int, token: int) -> None:
        self._last[row] = last = self._last.item(row) + 1
        self._tokens[row * self._row_size + last] = token

    def append_all(self, rows: NDArray[np.intp], tokens: Int32) -> None:
        """`tokens` [S] come next in the lines of `rows` [S], which differ."""
        self.write(rows, self._last[rows] + 1, tokens)

    def write(self, rows: NDArray[np.intp], positions: Int32, tokens: Int32) -> None:
        """`tokens` [S] come next in the lines of `rows` [S], at `positions` [S] there."""
        self._tokens[rows * self._row_size + positions] = tokens
        self._last[rows] = positions

    def pieces(self, row: int, first_block: int, end_block: int) -> list[bytes]:
        """The token ids of blocks first_block..end_block-1 in `row`, which are full, as bytes."""
        begin = row * self._blocks_per_row
        pieces: list[bytes] = self._blocks[begin + first_block : begin + end_block].tolist()
        return pieces
