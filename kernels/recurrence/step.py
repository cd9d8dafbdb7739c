"""A step's tokens as layers take them that keep states in blocks: device tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

CHUNK = 64  # tokens that kernels multiply at a time: chunks end where positions are a multiple of it
NO_STATE = -1  # a sequence's first tokens begin with zeros
PADS = -1  # no block: a decode's token is nobody's
CARRIED = -2  # tokens go on from the chunk just ahead of theirs


@dataclass(frozen=True, slots=True)
class StateStep:
    """T tokens: first B decodes, one to a sequence, then those of C chunks.

    Block numbers index the first dimension of a layer's states. A decode goes on from the states of block
    before[b], or from none, and leaves them in block after[b], which may be the same one. One that pads
    neither reads nor writes states, and its output is zeros, which later products may read. A chunk has up to
    CHUNK tokens, of one sequence and next to each other. Chunks are computed in their order: one may go on
    from the block in which another one before it left its states. Decodes come first: one that pads may stand
    where a chunk's token is, whose output comes after it.
    """

    before: Tensor  # [B] i32: NO_STATE or a block
    after: Tensor  # [B] i32: a block or PADS
    # [C, 4] i32: a chunk's first token in the step, its tokens (0 pads), the block whose states it goes on
    # from, NO_STATE or CARRIED, and the block that gets them behind it, or -1.
    chunks: Tensor
    used: Tensor | None = None  # [1] i32: those behind so many of them pad; None: any may have tokens

    @property
    def decodes(self) -> int:
        return len(self.before)

    def in_order(self) -> list[list[int]]:
        """Return [first, tokens, before, after] of decodes and then of chunks, without those that pad."""
        ends = zip(self.before.tolist(), self.after.tolist(), strict=True)
        decodes = [[token, 1, before, after] for token, (before, after) in enumerate(ends) if after != PADS]
        return decodes + [chunk for chunk in self.chunks.tolist() if chunk[1]]

    @property
    def last_used(self) -> Tensor:
        """Return [1] i32: behind which number of chunks all pad."""
        return self.chunks.new_full((1,), len(self.chunks)) if self.used is None else self.used
