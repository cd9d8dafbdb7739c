"""The block manager under a pool to play with, its sequences, and what was done last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from quire.engine.arrays import Int32, empty_int32
from quire.engine.hashing import BlockHasher
from quire.engine.lab.paths import Call, recorded
from quire.engine.memory.manager import BlockManager
from quire.engine.memory.pool import OutOfBlocks
from quire.engine.messages import Request, SamplingParams
from quire.engine.sequences.rows import Rows
from quire.engine.sequences.sequence import Sequence, SequenceGroup

MAX_SEQUENCES = 256  # on the device at once


@dataclass
class Member:
    """A sequence that was not freed. Equal voices say the same at the same position."""

    sequence: Sequence
    voice: int
    parent: int | None  # whom it was forked from


class LabState:
    """What operations work on. What they have planned counts as done when they end."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rows = Rows(MAX_SEQUENCES, num_blocks * block_size, block_size)
        hasher = BlockHasher(block_size, seed=0)
        self.blocks = BlockManager(num_blocks, block_size, self.rows, hasher, num_host_blocks)
        self.members: dict[int, Member] = {}
        self.operation = "begin"
        self.said = f"{num_blocks} free blocks of {block_size} tokens."
        self.path: list[Call] = []
        self._num_begun = 0
        self._num_voices = 0
        self._voices: dict[str, int] = {}  # of texts

    @contextmanager
    def doing(self, operation: str) -> Iterator[None]:
        """Record an operation. If it raises, it must have changed nothing."""
        with recorded() as calls:
            try:
                yield
            except (OutOfBlocks, ValueError) as refusal:
                self.said = f"Nothing has changed: {refusal}."
                raise
            finally:
                self.operation, self.path = operation, calls
        moves = self.blocks.take_moves()
        self.blocks.copied(moves)
        self.blocks.host.arrived(moves)

    def begin(self, voice: int, parent: int | None = None) -> int:
        """Begin a sequence without tokens, in a row; return its number. Raises ValueError."""
        self.check_row()
        self._num_begun += 1
        request = Request(self._num_begun, [], SamplingParams(temperature=0))
        (sequence,) = SequenceGroup(request, empty_int32(), request.id, ()).sequences
        self.rows.assign(sequence)
        self.members[request.id] = Member(sequence, voice, parent)
        return request.id

    def check_row(self) -> None:
        """Raises ValueError unless one more sequence may be on the device."""
        if self.rows.num_free == 0:
            raise ValueError(f"{MAX_SEQUENCES} sequences are on the device already, free one first")

    def voice_of(self, text: str | None) -> int:
        """Return the voice that says `text`, or a new one."""
        if text is not None and text in self._voices:
            return self._voices[text]
        self._num_voices += 1
        if text is not None:
            self._voices[text] = self._num_voices
        return self._num_voices

    def said_by(self, member: Member, start: int, end: int) -> Int32:
        """Return the tokens that the voice of `member` says at positions start..end-1."""
        places = np.arange(start, end, dtype=np.int64)
        return ((member.voice * 1_000_003 + places) % (1 << 31)).astype(np.int32)

    def set_tokens(self, sequence: Sequence, tokens: Int32) -> None:
        self.rows.tokens.put(sequence.row, tokens)
