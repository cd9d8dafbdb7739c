"""What the numbers of a `MoveRing` stand for."""

from __future__ import annotations

# What a move does; `HEADER` numbers stand for it, and the blocks after them.
STEP, ALLOCATE, HIT, FORK, RELEASE, KEEP, EVICT, DISCARD, PIN, COMPUTING, COMPUTED, HOLD, UNHOLD = range(13)
COPY, SWAP_OUT, SWAP_IN = range(13, 16)  # of two blocks; what changes by it is noted too
KINDS = 16
# Added to a kind: whose tables, caches or transfers. Cache groups of a tier have `KINDS` times their number.
DEVICE, HOST = 0, 1 << 16
HEADER = 5  # kind, number of blocks, request, index of its sequence, logical block of the first
NOBODY = -2  # in place of a request
