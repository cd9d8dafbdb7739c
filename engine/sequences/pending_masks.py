"""Constrained sequences that have taken a token, while a thread finds what may follow it."""

from __future__ import annotations

from quire.engine.sequences.sequence import NO_ROW, Sequence


class PendingMasks:
    """Sequences in the order in which their masks were asked for."""

    def __init__(self) -> None:
        self._stays: dict[Sequence, bool] = {}  # and whether it has kept its row since

    def __len__(self) -> int:
        return len(self._stays)

    def add(self, sequence: Sequence) -> None:
        """Have `sequence` wait, in its row if it has one."""
        self._stays[sequence] = sequence.row != NO_ROW

    def leave(self, sequence: Sequence) -> None:
        """Note that `sequence` gives up its row; if it gets one again, it is computed anew there."""
        if sequence in self._stays:
            self._stays[sequence] = False

    def drop(self, sequence: Sequence) -> None:
        """Forget `sequence`, which has ended."""
        self._stays.pop(sequence, None)

    def take(self, seconds: float | None) -> list[tuple[Sequence, bool]]:
        """Take those whose masks are there; return them, and whether each kept its row.

        Waits until the first one's mask has taken `seconds` to find; None: until it is there.
        """
        if not self._stays:
            return []
        _settles(next(iter(self._stays)), seconds)
        ready = [sequence for sequence in self._stays if _settles(sequence, 0.0)]
        return [(sequence, self._stays.pop(sequence)) for sequence in ready]


def _settles(sequence: Sequence, seconds: float | None) -> bool:
    assert sequence.constraint is not None
    return sequence.constraint.settles(seconds)
