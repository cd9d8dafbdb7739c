"""A plain map of what memory should hold, and a memory that executes moves as late as it may."""

from __future__ import annotations

from collections import deque

from quire.engine.memory.moves import Moves

Content = list["int | None"]
"""The content of each slot of a block: a history, or nothing yet."""


class Histories:
    """Numbers for token histories: what the keys and values of a position depend on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int | str, int], int] = {}
        self.origin: list[tuple[int | str, int]] = []  # number -> (history before, or the salt; token)

    def of(self, salt: str, tokens: list[int]) -> list[int]:
        """The history of every position of `tokens`; a tenant's are its own."""
        before: int | str = salt
        numbers = []
        for token in tokens:
            key = (before, token)
            if key not in self._numbers:
                self._numbers[key] = len(self.origin)
                self.origin.append(key)
            before = self._numbers[key]
            numbers.append(before)
        return numbers

    def tokens(self, block: Content) -> list[int]:
        """The tokens of a full block, each of which follows from the one before it."""
        found = []
        for slot, history in enumerate(block):
            assert history is not None, "a findable block is not written yet"
            before, token = self.origin[history]
            assert slot == 0 or before == block[slot - 1], "a findable block mixes two histories"
            found.append(token)
        return found


class LateMemory:
    """Both tiers and the device's block tables, as a runner would treat them.

    Copies and writes of a step happen when it is launched, its transfers when it is committed.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device: list[Content] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[Content] = [[None] * block_size for _ in range(num_host_blocks)]
        self.tables: dict[tuple[int, int], int] = {}
        self._arrivals: deque[list[tuple[Content, Content, list[Content], int]]] = deque()

    def launch(self, moves: Moves, writes: list[tuple[int, int, int]]) -> None:
        """`writes`: (row, position, history)."""
        self.tables.update(moves.entries)
        arrivals: list[tuple[Content, Content, list[Content], int]] = []
        for transfer in (*moves.swap_out, *moves.spills):
            source = self.device[transfer.device]
            arrivals.append((source, list(source), self.host, transfer.host))
            self.host[transfer.host] = [None] * self.block_size
        for transfer in moves.swap_in:
            source = self.host[transfer.host]
            arrivals.append((source, list(source), self.device, transfer.device))
            self.device[transfer.device] = [None] * self.block_size
        self._arrivals.append(arrivals)
        sources = {original for original, _ in moves.copies.values()}
        destinations = [copy for _, copy in moves.copies.values()]
        assert len(set(destinations)) == len(destinations), "two copies write one block"
        assert not sources & set(destinations), "a copy reads what another writes"
        for original, copy in moves.copies.values():
            self.device[copy] = list(self.device[original])
        written = set()
        for row, position, history in writes:
            target, slot = self.tables[row, position // self.block_size], position % self.block_size
            assert (target, slot) not in written, "a slot is written twice in one step"
            written.add((target, slot))
            self.device[target][slot] = history

    def arrive(self) -> None:
        """The oldest launched step is done."""
        for source, before, tier, destination in self._arrivals.popleft():
            assert source == before, "a block was written while a transfer read it"
            assert tier[destination] == [None] * self.block_size, "a block was written before its transfer"
            tier[destination] = before
