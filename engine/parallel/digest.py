"""Digests of sampled tokens: ranks that computed the same have the same."""

from __future__ import annotations

from zlib import crc32

from quire.engine.schedule.plan import StepResult

EVERY = 16  # steps between two digests that are compared
_STEP_BITS = 31


class TokenDigest:
    """A digest of all tokens that steps have sampled since start."""

    def __init__(self) -> None:
        self._digest = 0
        self._steps = 0

    def add(self, result: StepResult) -> int | None:
        """Take the next step's tokens; every so many steps return a mark: step and digest in one word."""
        self._digest = crc32(result.tokens.tobytes(), self._digest)
        self._steps += 1
        if self._steps % EVERY:
            return None
        return (self._steps & ((1 << _STEP_BITS) - 1)) << 32 | self._digest


def is_of_same_step(mark: int, other: int) -> bool:
    return mark >> 32 == other >> 32
