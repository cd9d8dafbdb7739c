"""The tokens of the sequences in rows, side by side."""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
from numpy.typing import NDArray

from quire.engine.allocation import gib, refused_where_too_large
from quire.engine.arrays import Int32, as_blocks

SPREAD = 2  # tokens that are copied in vain at most for each of those that rows have


class RowTokens:
    """One array of int32 for each row. A step writes its tokens by one assignment, however long they are.

    Each has room for `max_tokens`, and takes memory as far as it was ever written to: 1024 rows of
    131,072 tokens are 0.5 GB of addresses.
    """

    def __init__(self, num_rows: int, max_tokens: int, block_size: int) -> None:
        """Raises ValueError with the numbers where there are not so many addresses."""
        # An odd number of blocks: arrays of a power of two would compete for the same sets of the caches.
        self._blocks_per_row = -(-max_tokens // block_size) | 1
        self._row_size = self._blocks_per_row * block_size
        num_tokens = num_rows * self._row_size
        num_bytes = num_tokens * np.dtype(np.int32).itemsize
        told = f"{max_tokens:,} tokens for each of {num_rows:,} sequences take {gib(num_bytes)}"
        # Not from numpy, which asks for huge pages: one would hold the beginnings of many rows.
        with refused_where_too_large(told, "--max-num-seqs or --max-model-len", host_bytes=num_bytes):
            memory = mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        self._tokens = np.frombuffer(memory, np.int32)
        self._blocks = as_blocks(self._tokens, block_size)
        self._last = np.full(num_rows, -1, np.int32)  # position of each row's newest token

    def of(self, row: int) -> Int32:
        """Return the tokens [N] in `row`: a view, not to be kept until others are written there."""
        first = row * self._row_size
        return self._tokens[first : first + self.length(row)]

    def length(self, row: int) -> int:
        return self._last.item(row) + 1

    def put(self, row: int, tokens: Int32) -> None:
        """Replace what was in `row` by `tokens` [N]."""
        self._last[row] = len(tokens) - 1
        self.of(row)[:] = tokens

    def copy(self, source: int, destination: int) -> None:
        """Replace what was in row `destination` by the tokens in row `source`."""
        self._last[destination] = last = self._last.item(source)
        begin, to = source * self._row_size, destination * self._row_size
        self._tokens[to : to + last + 1] = self._tokens[begin : begin + last + 1]

    def copy_all(self, sources: list[int], destinations: list[int]) -> None:
        """Replace what was in each of the rows `destinations` by the tokens in another row."""
        lengths = self._last[sources] + 1
        most = int(lengths.max(initial=0))
        if len(sources) * most > SPREAD * int(lengths.sum()):
            for source, destination in zip(sources, destinations, strict=True):
                self.copy(source, destination)
            return
        rows = self._tokens.reshape(-1, self._row_size)
        rows[destinations, :most] = rows[sources, :most]
        self._last[destinations] = lengths - 1

    def clear(self, row: int) -> None:
        """Empty `row`, which no sequence is in any more."""
        self._last[row] = -1

    def append(self, row: int, token: int) -> None:
        self._last[row] = last = self._last.item(row) + 1
        self._tokens[row * self._row_size + last] = token

    def append_all(self, rows: NDArray[np.intp], tokens: Int32) -> None:
        """Append `tokens` [S], one to each of `rows` [S], which differ."""
        self.write(rows, self._last[rows] + 1, tokens)

    def write(self, rows: NDArray[np.intp], positions: Int32, tokens: Int32) -> None:
        """Append `tokens` [S], one to each of `rows` [S], at `positions` [S]: where each of them ends."""
        self._tokens[rows * self._row_size + positions] = tokens
        self._last[rows] = positions

    def block_contents(self, row: int, first_block: int, end_block: int) -> list[bytes]:
        """Return the token ids of blocks first_block..end_block-1 in `row`, which are full, as bytes."""
        begin = row * self._blocks_per_row
        contents: list[bytes] = self._blocks[begin + first_block : begin + end_block].tolist()
        return contents
