"""Sizes that a runner's buffers are made for."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.device.inputs import PER_ROW, PER_TOKEN
from quire.engine.device.staging import ALIGNMENT
from quire.engine.schedule.cascade import SMALLEST_CASCADE
from quire.kernels.attention.cascade import LANES

TABLE_ENTRIES = 1 << 18  # of whole tables that a step sends: a hundred rows of 40,000 tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """The most rows, tokens of a step, and tokens of a row."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def staging_words(limits: Limits, max_blocks: int) -> int:
    """Return the int32 words that nearly every plan takes: its rows, tokens, targets and moves.

    A step names new blocks for the tokens it computes, two a row to spare, and whole tables for rows that
    fork, share or come back: of these so many as are usual at once, and more by more memory. Of rows that
    share prefixes it names those of a cascade to every four.
    """
    rows, tokens = limits.max_num_seqs + 1, limits.max_num_batched_tokens
    tables = min(rows * max_blocks, max(max_blocks, TABLE_ENTRIES))
    moves = 2 * (tokens + 2 * rows + tables) + 2 * rows
    words = (PER_ROW + LANES // SMALLEST_CASCADE) * rows + (PER_TOKEN + 1) * tokens + moves
    return words + ALIGNMENT * (32 + rows)
